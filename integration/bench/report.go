package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"golang.org/x/sys/unix"
)

// figure is one number with its unit; a ratio has none.
type figure struct {
	Name  string  `json:"name"`
	Value float64 `json:"value"`
	Unit  string  `json:"unit,omitempty"`
}

func (f figure) String() string { return strings.TrimSpace(number(f.Value) + " " + f.Unit) }

// number has three digits that count.
func number(v float64) string {
	switch {
	case v == 0 || v >= 100:
		return fmt.Sprintf("%.0f", v)
	case v >= 10:
		return fmt.Sprintf("%.1f", v)
	case v >= 1:
		return fmt.Sprintf("%.2f", v)
	default:
		return fmt.Sprintf("%.3f", v)
	}
}

// result is one line of the table. One without a budget is for orientation.
type result struct {
	Part string `json:"part"`
	figure
	AtLeast *float64 `json:"atLeast,omitempty"`
	AtMost  *float64 `json:"atMost,omitempty"`
	Met     *bool    `json:"met,omitempty"`
	// Quartiles of the rounds' ratios say how far the machine can be trusted.
	Quartiles []float64 `json:"quartiles,omitempty"`
	Beside    []figure  `json:"beside,omitempty"`
}

func (r result) atLeast(limit float64) result {
	met := r.Value >= limit
	r.AtLeast, r.Met = &limit, &met
	return r
}

func (r result) atMost(limit float64) result {
	met := r.Value <= limit
	r.AtMost, r.Met = &limit, &met
	return r
}

func (r result) beside(name string, value float64, unit string) result {
	r.Beside = append(slices.Clone(r.Beside), figure{name, value, unit})
	return r
}

func (r result) budget() string {
	switch {
	case r.AtLeast != nil:
		return "≥ " + figure{Value: *r.AtLeast, Unit: r.Unit}.String()
	case r.AtMost != nil:
		return "≤ " + figure{Value: *r.AtMost, Unit: r.Unit}.String()
	default:
		return "-"
	}
}

func (r result) verdict() string {
	switch {
	case r.Met == nil:
		return ""
	case *r.Met:
		return "met"
	default:
		return "MISSED"
	}
}

// report is what a run has found.
type report struct {
	Time     time.Time `json:"time"`
	Short    bool      `json:"short"`
	Machine  machine   `json:"machine"`
	Versions []string  `json:"versions"`
	Results  []result  `json:"results"`
}

type machine struct {
	Kernel string `json:"kernel"`
	CPUs   int    `json:"cpus"`
	Go     string `json:"go"`
}

func newReport(short bool) *report {
	var u unix.Utsname
	_ = unix.Uname(&u) // an empty name if it does not know
	return &report{
		Time: time.Now().UTC().Truncate(time.Second), Short: short,
		Machine: machine{unix.ByteSliceToString(u.Release[:]), runtime.NumCPU(), runtime.Version()},
	}
}

func (r *report) print(out *os.File) {
	fmt.Fprintf(out, "\nLinux %s, %d CPUs, %s, %s\n", r.Machine.Kernel, r.Machine.CPUs, r.Machine.Go, strings.Join(r.Versions, ", "))
	fmt.Fprintln(out, "Throughput and latency: the sides take turns within a round; the median of the rounds' ratios [quartiles].")
	fmt.Fprintln(out, "ADD: the ratio of the medians.")
	fmt.Fprintln(out)
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "WHAT\tBUDGET\tMEASURED\t\tBESIDE IT")
	for _, x := range r.Results {
		measured := x.String()
		if len(x.Quartiles) == 2 {
			measured += fmt.Sprintf(" [%s–%s]", number(x.Quartiles[0]), number(x.Quartiles[1]))
		}
		beside := make([]string, len(x.Beside))
		for i, f := range x.Beside {
			beside[i] = f.Name + " " + f.String()
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\n", x.Name, x.budget(), measured, x.verdict(), strings.Join(beside, ", "))
	}
	_ = w.Flush() // to a terminal
}

func (r *report) write(path string) error {
	data, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	return os.WriteFile(path, append(data, '\n'), 0o644)
}

// quantile of values; 0.5 is the median.
func quantile(values []float64, q float64) float64 {
	s := slices.Sorted(slices.Values(values))
	at := q * float64(len(s)-1)
	i := int(at)
	if i+1 == len(s) {
		return s[i]
	}
	return s[i] + (at-float64(i))*(s[i+1]-s[i])
}

func median(values []float64) float64 { return quantile(values, 0.5) }

// ratio compares two sides round by round.
func ratio(part, name string, ours, theirs []float64) result {
	ratios := make([]float64, len(ours))
	for i := range ours {
		ratios[i] = ours[i] / theirs[i]
	}
	return result{
		Part: part, figure: figure{Name: name, Value: median(ratios)},
		Quartiles: []float64{quantile(ratios, 0.25), quantile(ratios, 0.75)},
	}
}
