package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-cni/sluice/plugin/files"
	"github.com/sluice-cni/sluice/plugin/truststore"
)

// caRepairTimeout bounds the repair of a container with a file system that hangs.
const caRepairTimeout = 5 * time.Second

const caRepairUsage = `usage: sluice ca-repair --pid PID --container ID --ca FILE --report FILE [--bundle FILE]
                        [--named PATH]… [--proc FOLDER] [--late]

Adds the CA certificates in FILE to the trust stores of a container that runs. sluiced calls it for containers that were
created without the hook.

`

// caRepairArgs are the arguments of the repair.
type caRepairArgs struct {
	caHookArgs
	proc      string
	pid       int
	container string
	late      bool
}

// caRepair repairs a container and returns the exit code. The report has the outcome; the code is 0 if it was written.
func caRepair(args []string) int {
	limitResources()
	ctx, cancel := context.WithTimeout(context.Background(), caRepairTimeout)
	defer cancel()
	repair, err := parseCARepair(args)
	if errors.Is(err, flag.ErrHelp) {
		return 0
	}
	if err != nil {
		logf("ca-repair: %s", err)
		return 1
	}
	report := repair.run(ctx)
	report.Late = repair.isLate(report)
	logReport("ca-repair", report)
	if err := writeReport(repair.report, report); err != nil {
		logf("ca-repair: %s", err)
		return 1
	}
	return 0
}

func parseCARepair(args []string) (caRepairArgs, error) {
	var repair caRepairArgs
	flags := repair.flags("ca-repair", caRepairUsage)
	flags.StringVar(&repair.proc, "proc", "/proc", "`FOLDER` of the host's processes")
	flags.IntVar(&repair.pid, "pid", 0, "`PID` of the container's first process")
	flags.StringVar(&repair.container, "container", "", "`ID` of the container")
	flags.BoolVar(&repair.late, "late", false,
		"note in the report that programs may have read their trust stores before")
	if err := parseFlags(flags, args); err != nil {
		return repair, err
	}
	if repair.pid <= 0 || repair.container == "" || repair.ca == "" || repair.report == "" {
		return repair, errors.New("reading the arguments: one of --pid, --container, --ca and --report is missing")
	}
	return repair, nil
}

// isLate reports whether programs may have read stores before they had the CA: now, or at an earlier repair.
func (r caRepairArgs) isLate(now truststore.Report) bool {
	if !r.late {
		return false
	}
	var before truststore.Report
	if data, err := files.ReadBounded(r.report, maxHookInput); err == nil && json.Unmarshal(data, &before) == nil &&
		before.Late {
		return true
	}
	return slices.ContainsFunc(now.Stores, func(s truststore.Store) bool {
		read := s.Kind != truststore.Anchor && s.Kind != truststore.Fallback
		return read && s.Action != truststore.Present && s.Action != truststore.Failed
	})
}

// run adds the CA. An error is in the report.
func (r caRepairArgs) run(ctx context.Context) truststore.Report {
	failed := func(err error) truststore.Report {
		return truststore.Report{State: truststore.Unknown, Error: err.Error()}
	}
	ca, err := files.ReadBounded(r.ca, maxHookInput)
	if err != nil {
		return failed(fmt.Errorf("reading the CA: %w", err))
	}
	p, err := openProcess(r.proc, r.pid, r.container)
	if err != nil {
		return failed(err)
	}
	defer func() { _, _ = p.root.Close(), p.namespace.Close() }() // only looked through
	root := fmt.Sprintf("/proc/self/fd/%d", p.root.Fd())
	return truststore.Add(ctx, root, ca, truststore.Options{Fallback: r.bundle, Named: r.named, Enter: p.enter})
}

// process is the first process of a container.
type process struct {
	root      *os.File
	namespace *os.File // its mount namespace
}

// openProcess opens the process and checks that it belongs to the container. The folder of a process in /proc is bound
// to it as a pidfd is: a later process with the same PID is not in it. Unlike pidfd_open(2) it does not need the PID
// namespace of the host.
func openProcess(proc string, pid int, container string) (process, error) {
	name := filepath.Join(proc, strconv.Itoa(pid))
	dir, err := os.OpenFile(name, unix.O_PATH|unix.O_DIRECTORY, 0)
	if err != nil {
		return process{}, fmt.Errorf("opening the container's process: %w", err)
	}
	cgroups, err := readAt(dir, "cgroup")
	if err != nil {
		return process{}, fmt.Errorf("reading the container's cgroup: %w", err)
	}
	if !strings.Contains(cgroups, container) {
		return process{}, fmt.Errorf("process %d is not in the cgroup of the container %s", pid, container)
	}
	namespace, err := openAt(dir, "ns/mnt", unix.O_RDONLY)
	if err != nil {
		return process{}, fmt.Errorf("opening the container's mount namespace: %w", err)
	}
	root, err := openAt(dir, "root", unix.O_PATH|unix.O_DIRECTORY)
	if err != nil {
		return process{}, fmt.Errorf("opening the container's root: %w", err)
	}
	return process{root: root, namespace: namespace}, nil
}

// enter moves the calling thread into the container's mount namespace. A thread that shares its root and its working
// directory may not change its mount namespace.
//
// The user namespace stays that of the node, also where the container has its own: only a process with a single thread
// could change it, and root of the node has all capabilities over the mounts of a user namespace below its own.
func (p process) enter() error {
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return fmt.Errorf("entering the container: unsharing the working directory: %w", err)
	}
	if err := unix.Setns(int(p.namespace.Fd()), unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("entering the container's mount namespace: %w", err)
	}
	return nil
}

func openAt(dir *os.File, name string, flags int) (*os.File, error) {
	fd, err := unix.Openat(int(dir.Fd()), name, flags|unix.O_CLOEXEC, 0)
	full := dir.Name() + "/" + name
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: full, Err: err}
	}
	return os.NewFile(uintptr(fd), full), nil
}

func readAt(dir *os.File, name string) (string, error) {
	f, err := openAt(dir, name, unix.O_RDONLY)
	if err != nil {
		return "", err
	}
	defer func() { _ = f.Close() }() // only read
	data, err := io.ReadAll(io.LimitReader(f, maxHookInput))
	if err != nil {
		return "", fmt.Errorf("reading %s: %w", f.Name(), err)
	}
	return string(data), nil
}
