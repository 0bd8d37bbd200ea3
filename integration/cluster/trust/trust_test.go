package trust

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/sluice-cni/sluice/integration/pki"
	"github.com/sluice-cni/sluice/plugin/truststore"
)

const (
	withStore    = "sluice:e2e" // Debian's bundle
	withoutStore = "localhost/pause:node"
	ownBundle    = "/etc/ssl/certs/ca-certificates.crt"
)

// body is the part of a certificate that a bundle has in a line of its own.
func (c *containerd) body() string {
	c.t.Helper()
	data, err := os.ReadFile(c.dir + "/ca/ca.pem")
	c.must(err)
	return strings.Split(string(data), "\n")[1]
}

// wantCA checks that a file in a container has the CA, and public roots if it is a bundle.
func (c *container) wantCA(file string) {
	c.pod.c.t.Helper()
	text := c.sh("cat " + file)
	if !strings.Contains(text, c.pod.c.body()) {
		c.pod.c.t.Errorf("%s does not have the CA (%d bytes)", file, len(text))
	}
	if n := strings.Count(text, "BEGIN"); n < 50 && file != "$NODE_EXTRA_CA_CERTS" {
		c.pod.c.t.Errorf("%s: got %d certificates, want the public roots as well", file, n)
	}
}

func readOnly(config *cri.ContainerConfig) { config.Linux.SecurityContext.ReadonlyRootfs = true }

func user(config *cri.ContainerConfig) {
	config.Linux.SecurityContext.RunAsUser = &cri.Int64Value{Value: 1000}
}

// volume is a read-only volume at /run, in which the runtime cannot make a folder.
func volume(config *cri.ContainerConfig) {
	config.Mounts = append(config.Mounts, &cri.Mount{ContainerPath: "/run", HostPath: "/etc/ssl", Readonly: true})
}

// TestContainers: every kind of container of a wanted pod has the CA in its bundle and in its variables before its
// first instruction, and a container of another pod has nothing of it.
func TestContainers(t *testing.T) {
	c := newContainerd(t)
	c.prepare()
	d := c.newDaemon()
	for _, test := range []struct {
		name, image string
		adjust      []func(*cri.ContainerConfig)
	}{
		{"plain", withStore, nil},
		{"read-only", withStore, []func(*cri.ContainerConfig){readOnly}},
		{"user", withStore, []func(*cri.ContainerConfig){user}},
		{"read-only-user", withStore, []func(*cri.ContainerConfig){readOnly, user}},
		{"volume", withStore, []func(*cri.ContainerConfig){volume}},
		{"no-store", withoutStore, nil},
		{"no-store-read-only-user", withoutStore, []func(*cri.ContainerConfig){readOnly, user}},
	} {
		p := c.newPod(test.name).want()
		for _, name := range []string{"init", "app"} { // for CRI, an init container is a container that ends
			container := p.run(name, test.image, test.adjust...)
			if got := d.ask("state " + p.uid()); got.State != truststore.Trusted {
				t.Errorf("%s: got %+v, want trusted", test.name, got)
			}
			container.wantCA("$NODE_EXTRA_CA_CERTS")
			container.wantCA("$SSL_CERT_FILE")
			container.wantCA("$REQUESTS_CA_BUNDLE")
			if test.image == withStore {
				container.wantCA(ownBundle)
				if got := container.sh("readlink $SSL_CERT_FILE"); got != ownBundle+"\n" {
					t.Errorf("%s: SSL_CERT_FILE leads to %q, want the image's bundle", test.name, got)
				}
			}
			container.remove()
		}
		if reports, _ := filepath.Glob(c.dir + "/run/reports/*"); len(reports) != 0 {
			t.Errorf("reports of containers that are gone: %v", reports)
		}
	}
	t.Run("its own variable", func(t *testing.T) {
		p := c.newPod("variable").want()
		container := p.run("app", withStore, func(config *cri.ContainerConfig) {
			config.Envs = []*cri.KeyValue{{Key: "SSL_CERT_FILE", Value: "/x"}}
		})
		if got := container.sh("echo $SSL_CERT_FILE"); got != "/x\n" {
			t.Errorf("SSL_CERT_FILE: got %q, want the container's own value", got)
		}
	})
	t.Run("another pod", func(t *testing.T) {
		container := c.newPod("other").run("app", withStore)
		for _, text := range []string{"ca-hook", "sluice-ca", "CERT_FILE", "NODE_EXTRA"} {
			if strings.Contains(container.spec(), text) {
				t.Errorf("its config.json has %q", text)
			}
		}
		if strings.Contains(container.sh("cat "+ownBundle), c.body()) {
			t.Error("its bundle has the CA")
		}
	})
}

// userNamespaced gives a pod a user namespace, as hostUsers: false does.
func userNamespaced(options *cri.NamespaceOption) {
	ids := []*cri.IDMapping{{ContainerId: 0, HostId: 100_000, Length: 65_536}}
	options.UsernsOptions = &cri.UserNamespace{Mode: cri.NamespaceMode_POD, Uids: ids, Gids: ids}
}

// TestUserNamespace: the hook in a pod with a user namespace adds the CA and cannot report it. The daemon sees the CA,
// and adds it where there was no hook.
func TestUserNamespace(t *testing.T) {
	features, err := exec.Command("runc", "features").Output() // an older one does not know the command
	if err != nil || !strings.Contains(string(features), `"idmap"`) {
		t.Skip("containerd needs runc 1.2 or later for user namespaces")
	}
	c := newContainerd(t)
	c.prepare()
	d := c.newDaemon()
	p := c.newPod("mapped", userNamespaced).want()
	container := p.run("app", withStore)
	d.wantReady(p, truststore.Trusted)
	container.wantCA(ownBundle)
	if got := container.sh("cat /proc/self/uid_map"); strings.Fields(got)[1] != "100000" {
		t.Errorf("got the mapping %q, want one of the pod's own", got)
	}
	d.kill()
	late := p.run("late", withStore)
	d = c.newDaemon("setpriv", "--no-new-privs", "--bounding-set", "-all,+"+strings.Join(capabilities, ",+"))
	d.wantReady(p, truststore.Trusted)
	late.wantCA(ownBundle)
}

// TestAbsentDaemon: a container is created while the daemon is down or hangs, and is repaired before Ready returns.
func TestAbsentDaemon(t *testing.T) {
	c := newContainerd(t)
	c.prepare()

	down := c.newPod("down").want()
	containers := []*container{
		down.run("plain", withStore), down.run("read-only", withStore, readOnly), down.run("user", withStore, user),
	}
	stopped := down.run("stopped", withStore)
	if err := syscall.Kill(stopped.pid(), syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	d := c.newDaemon()
	start := time.Now()
	got := d.wantReady(down, truststore.Trusted)
	t.Logf("four containers repaired within %s", time.Since(start))
	if len(got.Containers) != 4 || !strings.Contains(got.Containers[0].Note, "starts anew") {
		t.Errorf("got %+v, want four containers, with a note about their variables", got)
	}
	for _, container := range containers {
		container.wantCA(ownBundle)
	}
	if mounts := containers[1].sh("cat /proc/self/mountinfo"); strings.Count(mounts, ownBundle) != 1 {
		t.Errorf("the mounts of the read-only container: %s", mounts)
	}
	if err := syscall.Kill(stopped.pid(), syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	stopped.wantCA(ownBundle)

	bare := c.newPod("bare") // its pod is labelled while it runs
	bare.run("app", withoutStore)
	got = d.wantReady(bare.want(), truststore.Unknown)
	if len(got.Containers) != 1 || !strings.Contains(got.Containers[0].Note, "start it anew") {
		t.Errorf("got %+v, want advice", got)
	}

	d.signal(syscall.SIGSTOP)
	hung := c.newPod("hung").want()
	start = time.Now()
	container := hung.run("app", withStore)
	t.Logf("created with a daemon that hangs within %s", time.Since(start))
	d.signal(syscall.SIGCONT)
	c.eventually("the daemon is back", func() bool { return len(d.ask("state "+hung.uid()).Containers) == 1 })
	d.wantReady(hung, truststore.Trusted)
	container.wantCA(ownBundle)

	c.setCA(pki.NewCA("second").Cert)
	c.eventually("the second CA is trusted", func() bool {
		return strings.Contains(container.sh("cat "+ownBundle), c.body()) &&
			d.ask("state "+hung.uid()).State == truststore.Trusted
	})
	for _, container := range containers {
		container.wantCA(ownBundle)
	}

	d.kill()
	killed := c.newPod("killed").want()
	container = killed.run("app", withStore)
	c.newDaemon().wantReady(killed, truststore.Trusted)
	container.wantCA(ownBundle)
}

// TestRestartOfTheRuntime: the daemon connects again, and containers that were created before it are still trusted.
func TestRestartOfTheRuntime(t *testing.T) {
	c := newContainerd(t)
	c.prepare()
	d := c.newDaemon()
	before := c.newPod("before").want()
	before.run("app", withStore)
	c.stop()
	during := d.ask("state " + before.uid())
	if during.State != truststore.Trusted {
		t.Errorf("without the runtime: got %+v, want trusted", during)
	}
	c.start()
	after := c.newPod("after").want()
	var container *container
	c.eventually("a new container gets the hook", func() bool {
		if container != nil {
			container.remove()
		}
		container = after.run("app", withStore)
		return strings.Contains(container.spec(), "ca-hook")
	})
	container.wantCA("$SSL_CERT_FILE")
	d.wantReady(before, truststore.Trusted)
}

// TestTwoDaemons: while one daemon replaces another, containers are created, with everything once.
func TestTwoDaemons(t *testing.T) {
	c := newContainerd(t)
	c.prepare()
	first := c.newDaemon()
	p := c.newPod("pod").want()
	check := func(when string) {
		t.Helper()
		container := p.run("app", withStore)
		for _, text := range []string{`"ca-hook"`, `"NODE_EXTRA_CA_CERTS=`, `"destination":"/.sluice-ca"`} {
			if got := strings.Count(container.spec(), text); got != 1 {
				t.Errorf("%s: got %d times %s in config.json, want one", when, got, text)
			}
		}
		container.wantCA("$SSL_CERT_FILE")
		container.remove()
	}
	check("one daemon")
	second := c.newDaemon()
	check("two daemons")
	first.signal(syscall.SIGSTOP)
	check("the first one hangs")
	first.kill()
	check("the first one is gone")
	if got := second.ask("state " + p.uid()); got.State != truststore.Unknown || len(got.Containers) != 0 {
		t.Errorf("without a container: got %+v", got)
	}
}

// TestConnectDuringAStop: a daemon that starts while a container takes its time to stop does not keep the runtime from
// creating containers (https://github.com/containerd/containerd/issues/14083).
func TestConnectDuringAStop(t *testing.T) {
	c := newContainerd(t)
	c.prepare()
	p := c.newPod("pod").want()
	slow := p.run("slow", withStore, func(config *cri.ContainerConfig) {
		config.Command = []string{"/bin/sh", "-c", "trap '' TERM; sleep 100000"}
	})
	c.eventually("the signal is ignored", func() bool { return ignoresTERM(slow.pid()) })
	c.must(os.WriteFile(c.dir+"/stopping", nil, 0o600))
	stopped := make(chan error, 1)
	go func() {
		_, err := c.cri.StopContainer(t.Context(), &cri.StopContainerRequest{ContainerId: slow.id, Timeout: 20})
		stopped <- err
	}()
	d := c.newDaemon()
	container := p.run("app", withStore)
	select {
	case err := <-stopped:
		t.Fatalf("the container was created only after the stop had ended (%v)", err)
	default:
	}
	if got := d.ask("state " + p.uid()); !strings.Contains(got.Note, "stops a container") {
		t.Errorf("got %+v, want the reason for no connection", got)
	}
	c.must(<-stopped)
	c.must(os.Remove(c.dir + "/stopping"))
	c.eventually("the container is trusted", func() bool { return d.ask("state "+p.uid()).State == truststore.Trusted })
	container.wantCA(ownBundle)
}

// ignoresTERM reports whether a process ignores SIGTERM.
func ignoresTERM(pid int) bool {
	data, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid)) // empty: not yet
	_, after, _ := strings.Cut(string(data), "SigIgn:\t")
	mask, err := strconv.ParseUint(after[:min(16, len(after))], 16, 64)
	return err == nil && mask&(1<<(syscall.SIGTERM-1)) != 0
}
