package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"time"

	"github.com/sluice-cni/sluice/plugin/files"
	"github.com/sluice-cni/sluice/plugin/truststore"
)

const (
	// caHookTimeout is a second less than the two that the runtime gives the hook.
	caHookTimeout = time.Second
	// caHookMemory is a soft limit. The hook runs in the container's cgroup, which may have a small limit.
	caHookMemory = 10 << 20
	// caHookGC makes the first garbage collection come at 2 MiB, which a run with the usual stores does not reach.
	caHookGC = 50
	// maxHookInput bounds the state of the container and its configuration, as the runtime gives them.
	maxHookInput = 4 << 20
)

const caHookUsage = `usage: sluice ca-hook --ca FILE [--report FILE] [--bundle FILE] [--named PATH]…

An OCI createContainer hook: adds the CA certificates in FILE to the trust stores in the container's root. It reads the
container's state from standard input, and its exit code is always 0: a container starts without the CA rather than not.

`

const bundleUsage = "`FILE` in the container with a fallback bundle, alone on its mount; where the container has a " +
	"bundle of its own, a link to that takes its place"

// caHook runs the hook. It returns in time and without an error, because the runtime does not start a container whose
// hook fails.
func caHook(args []string, state io.Reader) {
	limitResources()
	ctx, cancel := context.WithTimeout(context.Background(), caHookTimeout)
	defer cancel()

	hook, err := parseCAHook(args)
	if errors.Is(err, flag.ErrHelp) {
		return
	}
	if err != nil {
		logf("ca-hook: %s", err)
		return
	}
	report := hook.run(ctx, state)
	logReport("ca-hook", report)
	if err := writeReport(hook.report, report); err != nil {
		logf("ca-hook: %s", err)
	}
}

// limitResources bounds the memory and the CPUs of this process. On one CPU no thread looks for the work of others.
func limitResources() {
	debug.SetMemoryLimit(caHookMemory)
	debug.SetGCPercent(caHookGC)
	runtime.GOMAXPROCS(1)
}

// logReport logs the errors in a report.
func logReport(command string, report truststore.Report) {
	for _, s := range report.Stores {
		if s.Error != "" {
			logf("%s: %s %s: %s", command, s.Kind, s.Path, s.Error)
		}
	}
	for _, text := range []string{report.Unsearched, report.Error} {
		if text != "" {
			logf("%s: %s", command, text)
		}
	}
}

// caHookArgs are the arguments of the hook.
type caHookArgs struct {
	ca     string // on the host
	report string // on the host
	bundle string // in the container
	named  []string
}

func parseCAHook(args []string) (caHookArgs, error) {
	var hook caHookArgs
	if err := parseFlags(hook.flags("ca-hook", caHookUsage), args); err != nil {
		return hook, err
	}
	if hook.ca == "" {
		return hook, errors.New("reading the arguments: --ca is missing")
	}
	return hook, nil
}

// flags returns the flags that set h.
func (h *caHookArgs) flags(command, usage string) *flag.FlagSet {
	flags := flag.NewFlagSet(command, flag.ContinueOnError)
	flags.StringVar(&h.ca, "ca", "", "`FILE` on the host with the CA certificates in PEM")
	flags.StringVar(&h.report, "report", "", "`FILE` on the host to write the report to, as JSON")
	flags.StringVar(&h.bundle, "bundle", "", bundleUsage)
	flags.Func("named", "`PATH` in the container of a bundle or a directory that one of its variables names; may be "+
		"repeated", func(path string) error {
		h.named = append(h.named, path)
		return nil
	})
	flags.Usage = func() {
		fmt.Fprint(flags.Output(), usage)
		flags.PrintDefaults()
	}
	return flags
}

// parseFlags reads arguments that are flags alone.
func parseFlags(flags *flag.FlagSet, args []string) error {
	if err := flags.Parse(args); err != nil {
		return fmt.Errorf("reading the arguments: %w", err)
	}
	if flags.NArg() > 0 {
		return fmt.Errorf("reading the arguments: unexpected argument %q", flags.Arg(0))
	}
	return nil
}

// run adds the CA. All errors are in the report.
func (h caHookArgs) run(ctx context.Context, state io.Reader) truststore.Report {
	root, err := containerRoot(ctx, state)
	if err != nil {
		return truststore.Report{State: truststore.Unknown, Error: err.Error()}
	}
	ca, err := files.ReadBounded(h.ca, maxHookInput)
	if err != nil {
		return truststore.Report{State: truststore.Unknown, Error: fmt.Errorf("reading the CA: %w", err).Error()}
	}
	return truststore.Add(ctx, root, ca, truststore.Options{Fallback: h.bundle, Named: h.named})
}

// containerRoot reads the state of the container from the runtime and returns the path of its root (runtime-spec,
// runtime.md and config.md).
func containerRoot(ctx context.Context, input io.Reader) (string, error) {
	var state struct {
		Bundle string `json:"bundle"`
	}
	if err := decodeInTime(ctx, input, &state); err != nil {
		return "", fmt.Errorf("reading the state of the container: %w", err)
	}
	if !filepath.IsAbs(state.Bundle) {
		return "", fmt.Errorf("reading the state of the container: the bundle %q is not an absolute path", state.Bundle)
	}
	data, err := files.ReadBounded(filepath.Join(state.Bundle, "config.json"), maxHookInput)
	if err != nil {
		return "", fmt.Errorf("reading the configuration of the container: %w", err)
	}
	var config struct {
		Root struct {
			Path string `json:"path"`
		} `json:"root"`
	}
	if err := json.Unmarshal(data, &config); err != nil {
		return "", fmt.Errorf("parsing the configuration of the container: %w", err)
	}
	if config.Root.Path == "" {
		return "", errors.New("parsing the configuration of the container: it has no root.path")
	}
	if filepath.IsAbs(config.Root.Path) {
		return config.Root.Path, nil
	}
	return filepath.Join(state.Bundle, config.Root.Path), nil
}

// decodeInTime decodes JSON from a pipe. Its writer may not write.
func decodeInTime(ctx context.Context, input io.Reader, value any) error {
	done := make(chan error, 1)
	go func() { done <- json.NewDecoder(io.LimitReader(input, maxHookInput)).Decode(value) }()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// writeReport replaces the report by rename, so that no reader sees a part of it.
func writeReport(path string, report truststore.Report) error {
	if path == "" {
		return nil
	}
	data, err := json.Marshal(report)
	if err != nil {
		return fmt.Errorf("encoding the report: %w", err)
	}
	if err := files.Replace(path, data, 0o600, filepath.Join(filepath.Dir(path), ".ca-*")); err != nil {
		return fmt.Errorf("writing the report: %w", err)
	}
	return nil
}
