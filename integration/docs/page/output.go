package page

import (
	"regexp"
	"strings"
)

// loosenings replace the parts of an output that differ from run to run, in this order.
var loosenings = []struct {
	pattern *regexp.Regexp
	with    string
}{
	// An attachment, such as cnitool-1127/eth0. The table of sluiced status cuts the container ID to 12 characters.
	{regexp.MustCompile(`[a-zA-Z0-9_.-]*\d[a-zA-Z0-9_.-]*/(eth\d+)`), "ID/$1"},
	// Times, such as 2026-01-02T15:04:05.123456789+01:00.
	{regexp.MustCompile(`\d{4}-\d\d-\d\dT[0-9:.]+(Z|[+-]\d\d:\d\d)`), "TIME"},
	// Durations, such as 2.3s, 1m0s or 15ms.
	{regexp.MustCompile(`\b(\d+(\.\d+)?(h|m|s|ms|µs))+\b`), "DURATION"},
	// Hexadecimal IDs, such as those of containers and git commits.
	{regexp.MustCompile(`\b([0-9a-f]{7,64})\b`), "ID"},
	// Numbers, with a unit of sluiced status if any.
	{regexp.MustCompile(`\d+(\.\d+)?[kMGTPE]?`), "N"},
	{regexp.MustCompile(`\s+`), " "},
}

// Loosen returns a line of output without the parts that differ from run to run.
func Loosen(line string) string {
	for _, l := range loosenings {
		line = l.pattern.ReplaceAllString(line, l.with)
	}
	return strings.TrimSpace(line)
}

// Matches tells whether an output is as the page shows it. Both are compared line by line, loosened and without empty
// lines. On the page a line "..." stands for any number of lines, and "..." at the end of a line for its rest.
func Matches(shown, output []string) bool { return matches(loosen(shown), loosen(output)) }

func loosen(lines []string) (loose []string) {
	for _, line := range lines {
		if line = Loosen(line); line != "" {
			loose = append(loose, line)
		}
	}
	return loose
}

func matches(shown, output []string) bool {
	for i, line := range shown {
		if line == "..." {
			for skip := range len(output) - i + 1 {
				if matches(shown[i+1:], output[i+skip:]) {
					return true
				}
			}
			return false
		}
		if i >= len(output) || line != output[i] && !isBeginning(line, output[i]) {
			return false
		}
	}
	return len(shown) == len(output)
}

// isBeginning tells whether a line ends with "..." on the page, and the output begins as the line does.
func isBeginning(line, output string) bool {
	beginning, cut := strings.CutSuffix(line, "...")
	return cut && strings.HasPrefix(output, beginning)
}
