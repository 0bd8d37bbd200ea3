package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sluice-cni/sluice/integration/cluster/images"
	"github.com/sluice-cni/sluice/integration/cluster/node"
	"github.com/sluice-cni/sluice/integration/cluster/programs"
)

// testNode is a node that is taken down when the test ends.
type testNode struct {
	node.Config
	tb       *testing.T
	programs map[string]string

	// The node's namespaces, such as "net:[4026531840]", while it is up. They are kept open: the kernel gives the
	// number of a namespace that has ended to another, such as one of a pod on another node.
	namespaces map[string]*os.File
}

func newNode(t *testing.T, dualStack bool) *testNode {
	t.Helper()
	repository, err := findRepository()
	if err != nil {
		t.Fatal(err)
	}
	source, cache := filepath.Join(repository, "integration/cluster"), filepath.Join(repository, "bin/cluster")
	paths, err := programs.Build(t.Context(), source, cache, os.Stderr)
	if err != nil {
		t.Fatal(err)
	}
	config := node.Config{Dir: filepath.Join(t.TempDir(), "node"), DualStack: dualStack}
	n := &testNode{Config: config, tb: t, programs: paths}
	t.Cleanup(n.down)
	return n
}

func (n *testNode) phase(name string, f func()) {
	n.tb.Helper()
	start := time.Now()
	f()
	n.tb.Logf("%-10s %6.1fs", name, time.Since(start).Seconds())
}

func (n *testNode) tryUp(ctx context.Context, paths map[string]string) error {
	n.tb.Helper()
	pause, err := images.Pause()
	if err != nil {
		n.tb.Fatal(err)
	}
	tar, err := pause.Bytes()
	if err != nil {
		n.tb.Fatal(err)
	}
	return node.Up(ctx, n.Config, paths, tar, n.tb.Output())
}

func (n *testNode) up(ctx context.Context, paths map[string]string) {
	n.tb.Helper()
	if err := n.tryUp(ctx, paths); err != nil {
		n.tb.Fatal(err)
	}
	n.namespaces = map[string]*os.File{}
	for kind := range strings.FieldsSeq("mnt net pid") {
		namespace := strings.TrimSpace(n.exec("readlink", "/proc/1/ns/"+kind))
		n.namespaces[namespace] = n.openNamespace(kind, namespace)
	}
}

func (n *testNode) openNamespace(kind, namespace string) *os.File {
	n.tb.Helper()
	links, _ := filepath.Glob("/proc/[0-9]*/ns/" + kind) // the only possible error is a malformed pattern
	for _, link := range links {
		if is, _ := os.Readlink(link); is != namespace {
			continue
		}
		if f, err := os.Open(link); err == nil { // otherwise the process has ended
			return f
		}
	}
	n.tb.Fatalf("no process is in %s of the node", namespace)
	return nil
}

// down takes the node down, and fails the test if a process, a file or a mount remains.
func (n *testNode) down() {
	n.tb.Helper()
	if err := node.Down(n.Config); err != nil {
		n.tb.Error(err)
	}
	n.expectNothingRuns()
	for _, f := range n.namespaces {
		_ = f.Close() // nothing was written
	}
	n.namespaces = nil
	if _, err := os.Stat(n.Dir); !os.IsNotExist(err) {
		n.tb.Errorf("the folder %s still exists (%v)", n.Dir, err)
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		n.tb.Fatal(err)
	}
	if strings.Contains(string(mounts), n.Dir) {
		n.tb.Errorf("mounts of the node remain:\n%s", mounts)
	}
}

// expectNothingRuns fails the test if a process of the node still runs after five seconds. Until a killed process has
// been reaped, it is still in /proc.
func (n *testNode) expectNothingRuns() {
	n.tb.Helper()
	var left []string
	for deadline := time.Now().Add(5 * time.Second); time.Now().Before(deadline); time.Sleep(20 * time.Millisecond) {
		if left = n.running(); left == nil {
			return
		}
	}
	n.tb.Errorf("processes of the node remain: %q", left)
}

// running lists the processes that have the node's folder in their command line, or are in its namespaces.
func (n *testNode) running() (left []string) {
	processes, _ := filepath.Glob("/proc/[0-9]*") // the only possible error is a malformed pattern
	for _, p := range processes {
		line, _ := os.ReadFile(p + "/cmdline")
		here := strings.Contains(string(line), `"`+n.Dir+`"`)
		for kind := range strings.FieldsSeq("mnt net pid") {
			namespace, _ := os.Readlink(p + "/ns/" + kind)
			here = here || n.namespaces[namespace] != nil
		}
		if here {
			left = append(left, p+" "+string(line))
		}
	}
	return left
}

func (n *testNode) load(i images.Image, err error) {
	n.tb.Helper()
	if err != nil {
		n.tb.Fatal(err)
	}
	tar, err := i.Bytes()
	if err != nil {
		n.tb.Fatal(err)
	}
	if err := node.Load(n.tb.Context(), n.Config, bytes.NewReader(tar)); err != nil {
		n.tb.Fatal(err)
	}
}

// script creates a shell script and returns its path.
func (n *testNode) script(text string) string {
	n.tb.Helper()
	path := filepath.Join(n.tb.TempDir(), "script")
	if err := os.WriteFile(path, []byte("#!/bin/sh\n"+text+"\n"), 0o755); err != nil {
		n.tb.Fatal(err)
	}
	return path
}

func (n *testNode) kubectl(stdin string, args ...string) string {
	n.tb.Helper()
	return n.must(n.try(stdin, slices.Concat([]string{filepath.Join(n.Dir, "kubectl")}, args)...))
}

func (n *testNode) jsonpath(object, path string) string {
	n.tb.Helper()
	return n.kubectl("", "get", object, "-o", "jsonpath="+path)
}

// exec runs a command on the node.
func (n *testNode) exec(args ...string) string {
	n.tb.Helper()
	argv, _, err := node.Command(n.Config, false, args...)
	if err != nil {
		n.tb.Fatal(err)
	}
	return n.must(n.try("", argv...))
}

func (n *testNode) try(stdin string, args ...string) (string, error) {
	cmd := exec.CommandContext(n.tb.Context(), args[0], args[1:]...)
	cmd.Env = append(os.Environ(), "KUBECONFIG="+n.Kubeconfig())
	cmd.Stdin = strings.NewReader(stdin)
	out, err := cmd.Output()
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
		err = fmt.Errorf("%v: %w: %s", args, err, exit.Stderr)
	}
	return string(out), err
}

func (n *testNode) must(out string, err error) string {
	n.tb.Helper()
	if err != nil {
		n.tb.Fatal(err)
	}
	return out
}

// eventually waits up to 30 seconds for a condition. wanted describes it.
func (n *testNode) eventually(wanted string, cond func() bool) {
	n.tb.Helper()
	for deadline := time.Now().Add(30 * time.Second); !cond(); time.Sleep(200 * time.Millisecond) {
		if time.Now().After(deadline) {
			n.tb.Fatalf("timed out waiting for: %s", wanted)
		}
	}
}
