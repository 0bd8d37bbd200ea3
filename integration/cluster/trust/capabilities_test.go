package trust

import (
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-cni/sluice/integration/pki"
	"github.com/sluice-cni/sluice/plugin/truststore"
)

// capabilities are those that the daemon's pod needs for repairs; answers to the runtime need none.
var capabilities = []string{
	"sys_admin",    // setns(2) into the mount namespace, and mounts there
	"sys_chroot",   // setns(2) into a mount namespace changes the root
	"sys_ptrace",   // /proc/PID/root and /proc/PID/ns of processes with other capabilities or users
	"dac_override", // to write into folders of other users
	"chown",        // the changed store keeps its owner
}

// TestCapabilities: with these capabilities every container is repaired, and with one of them less not every one.
func TestCapabilities(t *testing.T) {
	c := newContainerd(t)
	c.prepare()
	p := c.newPod("pod").want()
	p.run("plain", withStore)
	p.run("read-only", withStore, readOnly)
	p.run("user", withStore, user)
	owned := p.run("owned", withStore)
	owned.sh("chmod 640 " + ownBundle + " && chmod 700 /etc/ssl/certs && chown -R 1000:1000 /etc/ssl/certs")
	for _, missing := range append(capabilities, "") {
		c.setCA(pki.NewCA("without " + missing).Cert) // every container needs a repair
		rest := slices.DeleteFunc(slices.Clone(capabilities), func(name string) bool { return name == missing })
		d := c.newDaemon("setpriv", "--no-new-privs", "--bounding-set", "-all,+"+strings.Join(rest, ",+"))
		got := d.ask("ready " + p.uid())
		trusted := got.State == truststore.Trusted
		if trusted != (missing == "") {
			t.Errorf("without %q: got %+v", missing, got)
		}
		d.kill()
	}
}

// TestOwnProcesses: a daemon in a PID namespace of its own repairs containers by the host's /proc, mounted elsewhere.
func TestOwnProcesses(t *testing.T) {
	c := newContainerd(t)
	c.prepare()
	p := c.newPod("pod").want()
	container := p.run("app", withStore)
	t.Setenv(procVariable, c.dir+"/proc")
	c.must(os.Mkdir(c.dir+"/proc", 0o755))
	const script = `mount --rbind /proc "$SLUICE_TRUST_PROC" && mount -t proc proc /proc && exec "$0"`
	d := c.newDaemon("unshare", "--pid", "--fork", "--mount", "--kill-child", "sh", "-c", script)
	d.wantReady(p, truststore.Trusted)
	container.wantCA(ownBundle)
}
