package nested

import (
	"encoding/binary"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/sluice-cni/sluice/integration/testbed"
)

// words are 8 bytes each.
func words(values ...uint64) (stack []byte) {
	for _, v := range values {
		stack = binary.NativeEndian.AppendUint64(stack, v)
	}
	return stack
}

// TestExtend: the copy has all that the stack had, and the variables behind those that were there.
func TestExtend(t *testing.T) {
	t.Parallel()
	const (
		pointer   = 0x7fff_0000
		pageSize  = 6 // AT_PAGESZ
		arguments = 2
	)
	stack := slices.Concat(
		words(arguments, 0xa1, 0xa2, 0, 0xe1, 0, pageSize, 4096, auxSecure, 0, auxNull, 0), []byte("strings of it"))
	got, err := extend(stack, pointer, []string{"A=1", "LONGER=xyz"})
	must(t, err)
	const length = 14*8 + 16 // the strings take 15 bytes
	text := uint64(pointer - length + 14*8)
	want := slices.Concat(
		words(arguments, 0xa1, 0xa2, 0, 0xe1, text, text+4, 0, pageSize, 4096, auxSecure, 0, auxNull, 0),
		[]byte("A=1\x00LONGER=xyz\x00\x00"))
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got)\n%s", diff)
	}
	if len(got)%16 != 0 {
		t.Errorf("the stack pointer would not be aligned: %d bytes", len(got))
	}
}

// TestExtendNothing: a stack that is not that of a new program stays as it is.
func TestExtendNothing(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		stack   []byte
		entries []string
		fails   bool
	}{
		"more rights":           {words(0, 0, 0, auxSecure, 1, auxNull, 0), []string{"A=1"}, false},
		"too many arguments":    {words(1<<62, 0, 0, auxNull, 0), []string{"A=1"}, true},
		"arguments to the end":  {words(2, 1, 1), []string{"A=1"}, true},
		"no end of variables":   {words(0, 0, 1, 1, 1), []string{"A=1"}, true},
		"no end of the vector":  {words(0, 0, 0, 6, 4096, 6), []string{"A=1"}, true},
		"too many bytes to add": {words(0, 0, 0, auxNull, 0), []string{strings.Repeat("A", maxAdded)}, true},
	} {
		got, err := extend(c.stack, 1<<40, c.entries)
		if got != nil || (err != nil) != c.fails {
			t.Errorf("%s: got %d bytes and %v, want none, and an error: %t", name, len(got), err, c.fails)
		}
	}
}

// printVariables is a script.
const printVariables = "echo \"$NODE_EXTRA_CA_CERTS $DENO_TLS_CA_STORE $SSL_CERT_FILE\" >>/out"

// TestVariables: the first program of a container has the variables, with what it had before, and so have its children
// and a program that enters the container.
func TestVariables(t *testing.T) {
	const want = "/" + store + " mozilla,system /" + store + "\n"
	p := newPod(t)
	must(t, os.Symlink("busybox", filepath.Join(p.root, "bin/env")))
	newEngine(t, p)
	p.run("export MINE=1")
	p.start(printVariables + "; /bin/sh -c \"env\" >/tmp/env; [ $MINE = 1 ] && [ $# = 2 ] && [ $2 = b ]' sh a 'b")
	p.wantEnded(2)
	if got := p.output(); got != want {
		t.Errorf("the first program: got %q, want %q", got, want)
	}
	inherited, err := os.ReadFile(filepath.Join(p.root, "tmp/env"))
	must(t, err)
	if !strings.Contains(string(inherited), "NODE_EXTRA_CA_CERTS=/"+store+"\n") {
		t.Errorf("a child has the variables\n%s", inherited)
	}
}

// TestVariablesTooLate: a program that runs keeps its stack, and goes on.
func TestVariablesTooLate(t *testing.T) {
	const executes = "import os, signal\nsignal.signal(signal.SIGTERM, lambda *_: os._exit(7))\n" +
		"print('up', flush=True)\nwhile True:\n try: os.execv('/none', ['none'])\n except OSError: pass"
	for name, args := range map[string][]string{
		"it sleeps":      {"busybox", "sh", "-c", "trap 'exit 7' TERM; echo up; while :; do sleep 0.1; done"},
		"it computes":    {"busybox", "sh", "-c", "trap 'exit 7' TERM; echo up; while :; do :; done"},
		"its execs fail": {"python3", "-c", executes},
	} {
		t.Run(name, func(t *testing.T) {
			cmd := exec.Command(args[0], args[1:]...)
			out, err := cmd.StdoutPipe()
			must(t, err)
			must(t, cmd.Start())
			t.Cleanup(func() { _ = cmd.Process.Kill() }) // it has ended, unless the test has failed
			_, err = out.Read(make([]byte, 1))
			must(t, err)
			p, err := openProcess("/proc", uint32(cmd.Process.Pid), 0)
			must(t, err)
			defer p.close()
			late := 0
			for range 100 {
				added, err := p.addVariables(t.Context(), []string{"A=1"})
				if err == nil || added {
					t.Fatalf("got %t, %v, want an error", added, err)
				}
				if errors.Is(err, errTooLate) {
					late++
				}
			}
			if late == 0 { // others may have found a busy machine
				t.Errorf("got 100 errors, and never %q", errTooLate)
			}
			must(t, cmd.Process.Signal(unix.SIGTERM))
			if err := cmd.Wait(); cmd.ProcessState.ExitCode() != 7 {
				t.Errorf("got %v, want a program that ends as it wants to", err)
			}
		})
	}
}

// TestVariablesOfEntry: a program that enters a container has the variables, and keeps those of its own.
func TestVariablesOfEntry(t *testing.T) {
	p := newPod(t)
	newEngine(t, p)
	p.run("unshare --mount --pid --fork --root=$root /bin/sh -c 'echo up >/out; " +
		"while [ ! -e /tmp/go ]; do sleep 0.1; done' & child=$!")
	testbed.Eventually(t, "the container runs", func() bool { return p.output() == "up\n" })
	must(t, os.WriteFile(p.out, nil, 0o666))
	p.run("SSL_CERT_DIR=/x NODE_EXTRA_CA_CERTS=/mine nsenter --target=$(cat /proc/$child/task/$child/children) " +
		"--mount --root /bin/sh -c '" + printVariables + "'")
	p.wantEnded(2)
	if got, want := p.output(), "/mine mozilla,system \n"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	must(t, os.WriteFile(filepath.Join(p.root, "tmp/go"), nil, 0o644))
	p.run("wait $child")
	p.wantEnded(3)
}
