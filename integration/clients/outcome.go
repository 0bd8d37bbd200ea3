package clients

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"
)

// Commands of the program at GoFile.
const (
	GetCommand  = "get"  // get a URL as a client of Go's
	RunCommand  = "run"  // run the clients that are in the container, and print their outcomes
	IdleCommand = "idle" // do nothing until the end
	// ConnectCommand connects some times, and prints how many microseconds each takes.
	ConnectCommand = "connect"
)

// Outcome is the outcome of a client in a container.
type Outcome struct {
	Client string
	OK     bool
	Output string
}

// mark begins an outcome in the output of a container or a build, which may put words of its own before it.
const mark = "outcome of a client: "

// longest is the length of the part of a client's output that tells enough: a line of the output of a build is limited.
const longest = 600

// Print prints the outcome as one line. A client's output is cut.
func (o Outcome) Print(w io.Writer) {
	o.Output = strings.Join(strings.Fields(o.Output), " ")
	if len(o.Output) > longest {
		o.Output = "…" + strings.ToValidUTF8(o.Output[len(o.Output)-longest:], "")
	}
	line, _ := json.Marshal(o) // it has nothing that could fail
	_, _ = fmt.Fprintf(w, "%s%s\n", mark, line)
}

// Outcomes returns the outcomes in an output.
func Outcomes(output string) (found []Outcome, err error) {
	for line := range strings.Lines(output) {
		_, text, ok := strings.Cut(line, mark)
		if !ok {
			continue
		}
		var o Outcome
		if err := json.NewDecoder(strings.NewReader(text)).Decode(&o); err != nil {
			return nil, fmt.Errorf("reading an outcome from %q: %w", line, err)
		}
		found = append(found, o)
	}
	return found, nil
}
