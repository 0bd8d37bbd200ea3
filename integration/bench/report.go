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

// figure is one number with its name and unit. A ratio has no unit.
type figure struct {
	Name  string  `json:"name"`
	Value float64 `json:"value"`
	Unit  string  `json:"unit,omitempty"`
}

func (f figure) String() string { return strings.TrimSpace(number(f.Value) + " " + f.Unit) }

// number formats a value with three significant digits.
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

// result is one line of the table. A result without a budget is for information.
type result struct {
	Part string `json:"part"`
	figure
	AtLeast *float64 `json:"atLeast,omitempty"`
	AtMost  *float64 `json:"atMost,omitempty"`
	Met     *bool    `json:"met,omitempty"`
	// Quartiles of the rounds' ratios show how much the machine's performance varied.
	Quartiles []float64 `json:"quartiles,omitempty"`
	// Beside are the measurements from which the value was computed, and related ones.
	Beside []figure `json:"beside,omitempty"`
}

// measured is a result without a budget.
func measured(part, name string, value float64, unit string) result {
	return result{Part: part, figure: figure{name, value, unit}}
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

// report contains the results of a run, and the machine and the versions that they hold for.
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
	_ = unix.Uname(&u) // on failure, the kernel's release stays empty
	return &report{
		Time: time.Now().UTC().Truncate(time.Second), Short: short,
		Machine: machine{unix.ByteSliceToString(u.Release[:]), runtime.NumCPU(), runtime.Version()},
	}
}

// explanation is printed above the table.
const explanation = `Comparisons have the sides sluice (a captured pod), explicit (a pod that uses the proxy itself)
and redsocks (a pod in which redsocks redirects). The sides take turns in each round. "Relative to explicit" is the
value of sluice divided by the value of explicit: the median of the rounds' ratios [quartiles]. For ADD it is the ratio
of the medians.

`

func (r *report) print(out *os.File) {
	fmt.Fprintf(out, "\nLinux %s, %d CPUs, %s\n", r.Machine.Kernel, r.Machine.CPUs, r.Machine.Go)
	fmt.Fprintf(out, "%s\n\n", strings.Join(r.Versions, ", "))
	fmt.Fprint(out, explanation)
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "MEASUREMENT\tBUDGET\tRESULT\t\tDETAILS")
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
	_ = w.Flush() // a closed terminal is not a failure of the benchmark
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

// quantile returns the q-quantile of values, interpolated linearly. The 0.5-quantile is the median.
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
	r := measured(part, name, median(ratios), "")
	r.Quartiles = []float64{quantile(ratios, 0.25), quantile(ratios, 0.75)}
	return r
}
