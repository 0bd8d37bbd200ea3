package nested

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/sluice-cni/sluice/integration/pki"
	"github.com/sluice-cni/sluice/integration/testbed"
	"github.com/sluice-cni/sluice/plugin/truststore"
)

// lateStore is a store that appears while a container runs.
const lateStore = "etc/pki/tls/certs/ca-bundle.crt"

// TestLateStores: a store that appears in a container has the CA after some seconds, for a program that a script starts
// and for a job of a shell with job control.
func TestLateStores(t *testing.T) {
	const script = "mkdir -p /etc/pki/tls/certs; cat /new.pem >/" + lateStore + "\n" +
		"until /bin/grep -q \"" + marker + "\" /" + lateStore + "; do /bin/sleep 0.1; done\necho done >>/out\n"
	for name, shell := range map[string]string{
		"a script": "/usr/bin/bash /script", "jobs": "/usr/bin/bash -m /script",
	} {
		t.Run(name, func(t *testing.T) {
			p := newPod(t)
			p.addSystem()
			must(t, os.WriteFile(filepath.Join(p.root, "new.pem"), pki.NewCA("a company").Cert, 0o644))
			must(t, os.Symlink("busybox", filepath.Join(p.root, "bin/mkdir")))
			p.addScript("script", script)
			e := newEngine(t, p)
			p.start(shell)
			p.wantEnded(2)
			if got := p.output(); got != "done\n" {
				t.Errorf("got %q, want a store with the CA", got)
			}
			if containers, _ := e.State("uid"); len(containers) > 0 && containers[0].State != truststore.Trusted {
				t.Errorf("got %+v, want a container that trusts the CA", containers)
			}
		})
	}
}

// TestLookFromOtherRoot: a program whose root is a folder of the container brings a look at the container, and nothing
// is mounted in that folder: a build may make an image of it.
func TestLookFromOtherRoot(t *testing.T) {
	p := newPod(t)
	folder := filepath.Join(p.root, "folder")
	for _, name := range []string{"bin", "tmp", filepath.Dir(store)} {
		must(t, os.MkdirAll(filepath.Join(folder, name), 0o755))
	}
	must(t, os.Link(filepath.Join(p.root, "bin/busybox"), filepath.Join(folder, "bin/sh")))
	must(t, os.Rename(filepath.Join(p.root, store), filepath.Join(folder, store)))
	e := newEngine(t, p)
	p.start("busybox chroot /folder /bin/sh -c \"while [ ! -e /tmp/go ]; do sh -c :; done\"; " +
		"busybox grep -c \"" + marker + "\" /folder/" + store + " >/out; exit 0")
	testbed.Eventually(t, "the container is found to have no store", func() bool {
		containers, _ := e.State("uid")
		return len(containers) == 1 && containers[0].State == truststore.Unknown
	})
	late := filepath.Join(p.root, lateStore)
	must(t, os.MkdirAll(filepath.Dir(late), 0o755))
	must(t, os.WriteFile(late, pki.NewCA("a company").Cert, 0o644))
	testbed.Eventually(t, "the container trusts the CA", func() bool {
		containers, _ := e.State("uid")
		return len(containers) == 1 && containers[0].State == truststore.Trusted
	})
	must(t, os.WriteFile(filepath.Join(folder, "tmp/go"), nil, 0o644))
	p.wantEnded(1)
	if got := p.output(); got != "0\n" {
		t.Errorf("the store in the folder has the CA %q times, want 0", got)
	}
}

// TestLookWithoutChange: looks that find nothing new are not told to others.
func TestLookWithoutChange(t *testing.T) {
	p := newPod(t)
	e := newEngine(t, p)
	p.start("echo up >/out; while [ ! -e /tmp/go ]; do /bin/sleep 0.1; done")
	testbed.Eventually(t, "the container runs", func() bool { return p.output() == "up\n" })
	before := e.changes.Load()
	c := e.of("uid")[0]
	looks := func() uint64 {
		var at uint64
		e.mu.Lock()
		defer e.mu.Unlock()
		must(t, e.watcher.maps.looked.Lookup(c.mount, &at))
		return at
	}
	first := looks()
	testbed.Eventually(t, "the container is looked at again, twice", func() bool {
		return looks() > first+2*uint64(lookInterval)
	})
	if got := e.changes.Load(); got != before {
		t.Errorf("the state may have changed %d times, want none", got-before)
	}
	must(t, os.WriteFile(filepath.Join(p.root, "tmp/go"), nil, 0o644))
	p.wantEnded(1)
}
