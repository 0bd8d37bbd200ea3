package printable_test

import (
	"testing"

	"github.com/sluice-cni/sluice/daemon/printable"
)

func TestText(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		"mitmproxy 12.3.1":     "mitmproxy ",
		"\x1b[31mred\x1b[0m\n": "[31mred[0m",
		"Grüße":                "Grüße",
		"123456789ü":           "123456789", // a character is not cut in two
		"\xff\xfeb":            "\ufffd\ufffdb",
	} {
		if got := printable.Text(text, 10); got != want {
			t.Errorf("Text(%q) = %q, want %q", text, got, want)
		}
	}
}
