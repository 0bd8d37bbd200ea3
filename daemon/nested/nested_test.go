package nested

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-cni/sluice/integration/pki"
	"github.com/sluice-cni/sluice/integration/testbed"
	"github.com/sluice-cni/sluice/plugin/truststore"
)

// run runs an engine until the test ends, or until stop.
func run(t *testing.T, e *Engine) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := e.Run(ctx); err != nil {
			t.Errorf("Run: %v", err)
		}
	}()
	stop = func() {
		cancel()
		<-done
	}
	t.Cleanup(stop)
	return stop
}

// marker is in each store that has the CA.
const marker = "Added by sluice"

// countCA is a script that appends to /out how many certificates of the CA the store has.
const countCA = "grep -c \"" + marker + "\" /" + store + " >>/out"

// wantStore fails the test unless the store in the container's root is as it was.
func (p *pod) wantStore() {
	p.t.Helper()
	data, err := os.ReadFile(filepath.Join(p.root, store))
	must(p.t, err)
	if strings.Contains(string(data), marker) {
		p.t.Error("the store of the image has the CA")
	}
}

// TestContainers: a container has the CA at its first instruction, whatever the namespaces that it does without, and
// its root is not written.
func TestContainers(t *testing.T) {
	for name, options := range map[string][]string{
		"with the pod's network": nil,
		"with a network":         {"--net"},
		"in a user namespace":    {"--user", "--map-root-user"},
	} {
		t.Run(name, func(t *testing.T) {
			p := newPod(t)
			newEngine(t, p)
			for range 5 {
				p.start(countCA, options...)
			}
			p.wantEnded(5)
			if got, want := p.output(), strings.Repeat("1\n", 5); got != want {
				t.Errorf("the stores have the CA %q times, want %q", got, want)
			}
			p.wantStore()
		})
	}
}

// TestState: a container is known while it runs.
func TestState(t *testing.T) {
	p := newPod(t)
	e := newEngine(t, p)
	p.start("echo up >/out; while [ ! -e /tmp/go ]; do sleep 0.1; done", "--net")
	testbed.Eventually(t, "the container runs", func() bool { return p.output() != "" })
	containers, problem := e.State("uid")
	if len(containers) != 1 || problem != "" || containers[0].State != truststore.Trusted || containers[0].PodNetwork {
		t.Errorf("got %+v, %q, want one that trusts the CA", containers, problem)
	}
	must(t, os.WriteFile(filepath.Join(p.root, "tmp/go"), nil, 0o644))
	testbed.Eventually(t, "the container is forgotten", func() bool {
		containers, _ := e.State("uid")
		return len(containers) == 0
	})
}

// TestUpdater: the mounts step aside for an updater, and are back for the next program.
func TestUpdater(t *testing.T) {
	p := newPod(t)
	newEngine(t, p)
	const rename = "mv /tmp/new /" + store
	must(t, os.Remove(filepath.Join(p.root, "bin/dpkg")))
	must(t, os.WriteFile(filepath.Join(p.root, "bin/dpkg"), []byte("#!/bin/sh\n"+
		"busybox cp /"+store+" /tmp/new && echo \"# updated\" >>/tmp/new && busybox "+rename+"\n"), 0o755))
	p.start("busybox cp /" + store + " /tmp/new; ! busybox " + rename + " 2>/dev/null && dpkg && busybox " + countCA)
	p.wantEnded(1)
	if got := p.output(); got != "1\n" {
		t.Errorf("the store has the CA %q times after the update, want once", got)
	}
	p.wantStore()
	data, err := os.ReadFile(filepath.Join(p.root, store))
	must(t, err)
	if !strings.HasSuffix(string(data), "# updated\n") {
		t.Error("the store was not updated")
	}
}

// TestInstaller: the mounts over stores in Python packages step aside for a program that installs packages, and those
// of the machine stay if it has the variables.
func TestInstaller(t *testing.T) {
	const certifi = "usr/lib/python3/dist-packages/certifi/cacert.pem"
	for name, c := range map[string]struct{ before, want string }{
		"with the variables":    {"", "0\n1\n0\n1\n1\n"},
		"that runs a program":   {"set run; ", "0\n0\n0\n1\n1\n"},
		"without the variables": {"unset SSL_CERT_FILE; ", "0\n0\n0\n1\n1\n"},
	} {
		t.Run(name, func(t *testing.T) {
			p := newPod(t)
			e := newEngine(t, p)
			must(t, os.MkdirAll(filepath.Dir(filepath.Join(p.root, certifi)), 0o755))
			must(t, os.WriteFile(filepath.Join(p.root, certifi), pki.NewCA("another public root").Cert, 0o644))
			p.addScript("bin/uv", "#!/bin/sh\n"+
				"grep -c \""+marker+"\" /"+certifi+" >>/out; grep -c \""+marker+"\" /"+store+" >>/out\n"+
				"while [ ! -e /tmp/go ]; do sleep 0.1; done\n"+
				"busybox cp /"+certifi+" /tmp/new && busybox mv /tmp/new /"+certifi+"; echo $? >>/out\n")
			p.start(c.before + "uv $1; grep -c \"" + marker + "\" /" + certifi + " >>/out; " + countCA)
			testbed.Eventually(t, "the installer runs", func() bool { return strings.Count(p.output(), "\n") == 2 })
			containers, _ := e.State("uid")
			want := truststore.Trusted
			if c.before != "" {
				want = truststore.FilesOnly
			}
			if len(containers) != 1 || containers[0].State != want {
				t.Errorf("got %+v, want a container with the state %s", containers, want)
			}
			must(t, os.WriteFile(filepath.Join(p.root, "tmp/go"), nil, 0o644))
			p.wantEnded(1)
			if got := p.output(); got != c.want {
				t.Errorf("got %q, want %q", got, c.want)
			}
		})
	}
}

// TestFirstIsEditor: the first program of a container can change a store.
func TestFirstIsEditor(t *testing.T) {
	p := newPod(t)
	newEngine(t, p)
	p.run("unshare --mount --pid --fork --root=$root /bin/rm /" + store)
	p.wantEnded(1)
	if _, err := os.Stat(filepath.Join(p.root, store)); !os.IsNotExist(err) {
		t.Errorf("the store is there: %v", err)
	}
}

// TestRotation: containers that run are given the next CA in place of the last one.
func TestRotation(t *testing.T) {
	p := newPod(t)
	e := newEngine(t, p)
	p.start("echo up >/out; while [ ! -e /tmp/go ]; do sleep 0.1; done; : >/out; cat /" + store + " >>/out")
	testbed.Eventually(t, "the container runs", func() bool { return p.output() != "" })
	next := pki.NewCA("the next").Cert
	must(t, os.WriteFile(e.ca, next, 0o600))
	e.Update()
	e.work.Wait()
	must(t, os.WriteFile(filepath.Join(p.root, "tmp/go"), nil, 0o644))
	p.wantEnded(1)
	if got := p.output(); strings.Count(got, marker) != 1 || !strings.Contains(got, string(next)) {
		t.Errorf("want the next CA alone, got\n%s", got)
	}
	p.wantStore()
}

// TestRunning: a container that runs when the daemon starts is given the CA.
func TestRunning(t *testing.T) {
	p := newPod(t)
	p.start("echo up >/out; while [ ! -e /tmp/go ]; do sleep 0.1; done; " + countCA)
	testbed.Eventually(t, "the container runs", func() bool { return p.output() != "" })
	e := newEngine(t, p)
	testbed.Eventually(t, "the container is looked at", func() bool {
		containers, _ := e.State("uid")
		return len(containers) == 1 && strings.Contains(containers[0].Note, "while it ran")
	})
	e.Update()
	e.work.Wait()
	if containers, _ := e.State("uid"); len(containers) != 1 || containers[0].State != truststore.Unknown {
		t.Errorf("after a further look: got %+v, want an unknown container", containers)
	}
	must(t, os.WriteFile(filepath.Join(p.root, "tmp/go"), nil, 0o644))
	p.wantEnded(1)
	if got := p.output(); got != "up\n1\n" {
		t.Errorf("got %q, want the CA once", got)
	}
}

// TestRunningWithNetwork: an updater in a container with a network of its own is noticed, also if no program has
// started in the pod's netns since the daemon has.
func TestRunningWithNetwork(t *testing.T) {
	p := newPod(t)
	must(t, os.Remove(filepath.Join(p.root, "bin/dpkg")))
	p.addScript("bin/dpkg", "#!/bin/sh\nbusybox mv /tmp/go /"+store+"\n")
	p.start("echo up >/out; while [ ! -e /tmp/go ]; do sleep 0.1; done; dpkg; echo $? >/out", "--net")
	testbed.Eventually(t, "the container runs", func() bool { return p.output() != "" })
	e := newEngine(t, p)
	testbed.Eventually(t, "the container is looked at", func() bool {
		containers, _ := e.State("uid")
		return len(containers) == 1
	})
	must(t, os.WriteFile(filepath.Join(p.root, "tmp/go"), nil, 0o644))
	p.wantEnded(1)
	if got := p.output(); got != "0\n" {
		t.Errorf("the updater has ended with %q, want 0", got)
	}
}

// TestUpdaterRunsAtStart: an updater that started while no daemon ran can replace a store. The CA is back at its end.
func TestUpdaterRunsAtStart(t *testing.T) {
	p := newPod(t)
	must(t, os.Remove(filepath.Join(p.root, "bin/dpkg")))
	p.addScript("bin/dpkg", "#!/bin/sh\necho up >/out; while [ ! -e /tmp/go ]; do sleep 0.1; done\n"+
		"busybox cp /"+store+" /tmp/new && busybox mv /tmp/new /"+store+"\n")
	p.start("dpkg; echo $? >/out; while [ -e /tmp/go ]; do sleep 0.1; done; " + countCA)
	testbed.Eventually(t, "the updater runs", func() bool { return p.output() != "" })
	e := newEngine(t, p)
	if containers, _ := e.State("uid"); len(containers) != 1 || containers[0].State != truststore.FilesOnly {
		t.Errorf("got %+v, want a container with an updater", containers)
	}
	goOn := filepath.Join(p.root, "tmp/go")
	must(t, os.WriteFile(goOn, nil, 0o644))
	testbed.Eventually(t, "the container has the CA after the updater", func() bool {
		containers, _ := e.State("uid")
		return len(containers) == 1 && strings.Contains(containers[0].Note, "while it ran")
	})
	must(t, os.Remove(goOn))
	p.wantEnded(1)
	if got := p.output(); got != "0\n1\n" {
		t.Errorf("got %q, want an updater that ends with 0, and the CA once", got)
	}
	p.wantStore()
}

// TestRunningOnAnOlderKernel: a container that runs when the daemon starts is looked at when it starts a program.
func TestRunningOnAnOlderKernel(t *testing.T) {
	p := newPod(t)
	p.start("echo up >/out; while [ ! -e /tmp/go ]; do sleep 0.1; done; /bin/busybox true; " + countCA +
		"; while [ -e /tmp/go ]; do sleep 0.1; done")
	testbed.Eventually(t, "the container runs", func() bool { return p.output() != "" })
	e := newEngineWith(t, p, false)
	goOn := filepath.Join(p.root, "tmp/go")
	must(t, os.WriteFile(goOn, nil, 0o644))
	testbed.Eventually(t, "the container has looked at its store", func() bool { return p.output() == "up\n1\n" })
	containers, _ := e.State("uid")
	if len(containers) != 1 || !strings.Contains(containers[0].Note, "while it ran") {
		t.Errorf("got %+v, want one container that was given the CA while it ran", containers)
	}
	must(t, os.Remove(goOn))
	p.wantEnded(1)
	p.start("while [ ! -e /tmp/go ]; do sleep 0.1; done")
	testbed.Eventually(t, "a new container counts as trusting", func() bool {
		containers, _ := e.State("uid")
		return len(containers) == 1 && containers[0].State == truststore.Trusted
	})
	must(t, os.WriteFile(goOn, nil, 0o644))
	p.wantEnded(2)
}

// TestEnd: containers start as before when the engine has ended, or watches no pod.
func TestEnd(t *testing.T) {
	p := newPod(t)
	e := newEngine(t, p)
	p.start(countCA)
	p.wantEnded(1)
	e.Watch(nil)
	p.start(countCA + "; true")
	p.wantEnded(2)
	e.Watch(map[uint32]string{p.netns: "uid"})
	e.work.Wait()
	p.start(countCA)
	p.wantEnded(3)
	e.stop()
	p.start(countCA + "; true")
	p.wantEnded(4)
	if got := p.output(); got != "1\n0\n1\n0\n" {
		t.Errorf("the stores have the CA %q times, want once while the engine runs", got)
	}
}

// TestOptOut: the mounts go away from the containers that run in a pod that is not watched any more.
func TestOptOut(t *testing.T) {
	for name, others := range map[string]map[uint32]string{"the last pod": nil, "one of two": {1: "other"}} {
		t.Run(name, func(t *testing.T) {
			p := newPod(t)
			e := newEngine(t, p)
			p.start(countCA + "; while [ ! -e /tmp/go ]; do sleep 0.1; done; " + countCA + "; exit 0")
			testbed.Eventually(t, "the container runs", func() bool { return p.output() == "1\n" })
			e.Watch(others)
			e.work.Wait()
			must(t, os.WriteFile(filepath.Join(p.root, "tmp/go"), nil, 0o644))
			p.wantEnded(1)
			if got := p.output(); got != "1\n0\n" {
				t.Errorf("the store has the CA %q times, want once and never after the pod has opted out", got)
			}
			if containers, _ := e.State("uid"); len(containers) != 0 {
				t.Errorf("got %+v, want no container", containers)
			}
		})
	}
}

// TestChangesOfMind: a pod opts in and out while its containers start and run. In the end the stores have the CA, or no
// mount, as the last decision says.
func TestChangesOfMind(t *testing.T) {
	for name, want := range map[string]string{"in": "1\n", "out": "0\n"} {
		t.Run(name, func(t *testing.T) {
			p := newPod(t)
			e := newEngine(t, p)
			const containers = 8
			for range containers {
				p.run("unshare --mount --pid --fork --root=$root /bin/sh -c 'echo up >>/tmp/up; " +
					"while [ ! -e /tmp/go ]; do sleep 0.1; done; " + countCA + "; exit 0' & ")
			}
			in := map[uint32]string{p.netns: "uid"}
			up := filepath.Join(p.root, "tmp/up")
			testbed.Eventually(t, "all containers run", func() bool {
				e.Watch(nil)
				e.Watch(in)
				data, _ := os.ReadFile(up) // none does yet
				return strings.Count(string(data), "up") == containers
			})
			if name == "out" {
				e.Watch(nil)
			}
			e.work.Wait()
			p.run("wait")
			must(t, os.WriteFile(filepath.Join(p.root, "tmp/go"), nil, 0o644))
			p.wantEnded(containers + 1)
			if got := p.output(); got != strings.Repeat(want, containers) {
				t.Errorf("the stores have the CA %q times, want %q each", got, want)
			}
		})
	}
}

// TestCopies: the containers of a pod share a tmpfs of bounded size.
func TestCopies(t *testing.T) {
	p := newPod(t)
	must(t, os.Symlink("busybox", filepath.Join(p.root, "bin/stat")))
	newEngine(t, p)
	for range 2 {
		p.start("stat -c %d /" + store + " >>/out; stat -f -c \"%S %b\" /" + store + " >>/out")
	}
	p.wantEnded(2)
	got := strings.Split(strings.TrimSpace(p.output()), "\n")
	if len(got) != 4 || got[0] != got[2] {
		t.Errorf("got %q, want the same device twice", got)
	}
	var block, blocks int
	if _, err := fmt.Sscan(got[1], &block, &blocks); err != nil || block*blocks != tmpfsSize {
		t.Errorf("the size is %d times %d bytes (%v), want %d", blocks, block, err, tmpfsSize)
	}
}

// TestBusyMachine: containers have the CA and the variables at their first instruction also on a machine that has no
// time.
func TestBusyMachine(t *testing.T) {
	testbed.KeepBusy(t, 2*runtime.NumCPU())
	p := newPod(t)
	newEngine(t, p)
	before := testbed.Namespaces(t, os.Getpid())
	const starts = 100
	for range starts {
		p.start(countCA + "; [ \"$DENO_TLS_CA_STORE\" ]")
	}
	testbed.Within(t, 5*time.Minute, "all containers have ended", func() bool {
		return strings.Count(p.log(), "ended ") == starts
	})
	p.wantEnded(starts)
	if got, want := p.output(), strings.Repeat("1\n", starts); got != want {
		t.Errorf("the stores have the CA %q times, want %q", got, want)
	}
	if after := testbed.Namespaces(t, os.Getpid()); !slices.Equal(after, before) {
		t.Errorf("the first thread was in %q, and is in %q", before, after)
	}
}

// TestWithoutBTF: on a kernel without its types containers start as ever, and the status says why they are not given
// the CA. They are when the kernel has the types, after the next look at the pods.
func TestWithoutBTF(t *testing.T) {
	const types = "/sys/kernel/btf"
	must(t, unix.Mount("tmpfs", types, "tmpfs", 0, "")) // in the mount namespace of the tests
	hidden := true
	show := func() {
		if hidden {
			must(t, unix.Unmount(types, 0))
			hidden = false
		}
	}
	t.Cleanup(show)
	p := newPod(t)
	e := newTestEngine(t)
	e.Watch(map[uint32]string{p.netns: "uid"})
	run(t, e.Engine)
	testbed.Eventually(t, "the status says why", func() bool {
		_, problem := e.State("uid")
		return strings.Contains(problem, "BTF")
	})
	p.start(countCA + "; exit 0")
	p.wantEnded(1)
	show()
	e.Watch(map[uint32]string{p.netns: "uid"})
	e.work.Wait()
	p.start(countCA)
	p.wantEnded(2)
	if got := p.output(); got != "0\n1\n" {
		t.Errorf("the stores have the CA %q times, want never, and once", got)
	}
}

// TestReaderFails: the status says so, and containers have the CA again after the next look at the pods.
func TestReaderFails(t *testing.T) {
	p := newPod(t)
	e := newEngine(t, p)
	e.mu.Lock()
	err := e.watcher.reader.Close()
	e.mu.Unlock()
	must(t, err)
	testbed.Eventually(t, "the status says so", func() bool {
		_, problem := e.State("uid")
		return problem != ""
	})
	e.Watch(map[uint32]string{p.netns: "uid"})
	e.work.Wait()
	if _, problem := e.State("uid"); problem != "" {
		t.Errorf("got the problem %q, want none", problem)
	}
	p.start(countCA)
	p.wantEnded(1)
	if got := p.output(); got != "1\n" {
		t.Errorf("the store has the CA %q times, want once", got)
	}
}
