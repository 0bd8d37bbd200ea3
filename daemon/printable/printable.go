// Package printable makes text that pods and proxies choose fit for logs, statuses and terminals.
package printable

import (
	"strings"
	"unicode"
)

// Text removes the characters that could control a terminal, and cuts the text after limit bytes.
func Text(text string, limit int) string {
	text = strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return -1
		}
		return r
	}, text)
	return strings.ToValidUTF8(text[:min(len(text), limit)], "")
}
