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

// testNode is a node that is down when the test ends.
type testNode struct {
	node.Config
	tb       *testing.T
	programs map[string]string
	spaces   map[string]bool // its namespaces, once it is up
}

func newNode(t *testing.T, dualStack bool) *testNode {
	t.Helper()
	repository, err := findRepository()
	if err != nil {
		t.Fatal(err)
	}
	paths, err := programs.Build(t.Context(), filepath.Join(repository, "integration/cluster"), filepath.Join(repository, "bin/cluster"), os.Stderr)
	if err != nil {
		t.Fatal(err)
	}
	n := &testNode{Config: node.Config{Dir: filepath.Join(t.TempDir(), "node"), DualStack: dualStack}, tb: t, programs: paths}
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
	n.spaces = map[string]bool{}
	for kind := range strings.FieldsSeq("mnt net pid") {
		n.spaces[strings.TrimSpace(n.exec("readlink", "/proc/1/ns/"+kind))] = true
	}
}

// down takes the node down and sees that it is.
func (n *testNode) down() {
	n.tb.Helper()
	if err := node.Down(n.Config); err != nil {
		n.tb.Error(err)
	}
	n.expectNothingRuns()
	if _, err := os.Stat(n.Dir); !os.IsNotExist(err) {
		n.tb.Errorf("%s: %v, want nothing", n.Dir, err)
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		n.tb.Fatal(err)
	}
	if strings.Contains(string(mounts), n.Dir) {
		n.tb.Errorf("mounts are left:\n%s", mounts)
	}
}

// expectNothingRuns: soon, when the dead are collected, no process has the node's folder in its command line, or is
// in its namespaces.
func (n *testNode) expectNothingRuns() {
	n.tb.Helper()
	var left []string
	for deadline := time.Now().Add(5 * time.Second); time.Now().Before(deadline); time.Sleep(20 * time.Millisecond) {
		if left = n.running(); left == nil {
			return
		}
	}
	n.tb.Errorf("processes are left: %q", left)
}

func (n *testNode) running() (left []string) {
	processes, _ := filepath.Glob("/proc/[0-9]*") // the pattern is good
	for _, p := range processes {
		line, _ := os.ReadFile(p + "/cmdline")
		here := strings.Contains(string(line), `"`+n.Dir+`"`)
		for kind := range strings.FieldsSeq("mnt net pid") {
			space, _ := os.Readlink(p + "/ns/" + kind)
			here = here || n.spaces[space]
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

// script makes a program.
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

func (n *testNode) eventually(what string, cond func() bool) {
	n.tb.Helper()
	for deadline := time.Now().Add(30 * time.Second); !cond(); time.Sleep(200 * time.Millisecond) {
		if time.Now().After(deadline) {
			n.tb.Fatalf("it never happened: %s", what)
		}
	}
}
