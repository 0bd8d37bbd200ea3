package conflist

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sluice-cni/sluice/integration/testbed"
	"github.com/sluice-cni/sluice/plugin/attach"
)

const primaryFile, ciliumFile = "10-pods.conflist", "05-cilium.conflist"

// newNode is a node on which the daemon has installed the plugin.
func newNode(t *testing.T, version string) (*testbed.Node, *testbed.Daemon) {
	t.Helper()
	n := testbed.New(t)
	n.CNIVersion = version
	n.Install()
	d := n.StartDaemon()
	ready(t, d, "at the start")
	return n, d
}

func ready(t *testing.T, d *testbed.Daemon, event string) {
	t.Helper()
	testbed.Eventually(t, event+": the daemon is ready", func() bool { return d.Status().NotReady == "" })
}

// TestExclusiveCilium: Cilium, as it is installed by default, undoes the plugin's entry as soon as it is there. The
// daemon must not be ready then.
func TestExclusiveCilium(t *testing.T) {
	t.Parallel()
	n, d := newNode(t, "1.0.0")
	testbed.Launch(n.Host, writer(t, "writers"), "cilium-exclusive", n.ConfDir)
	testbed.Eventually(t, "the daemon says that the installation is contested", func() bool {
		return d.Status().Contested != attach.Contest{}
	})
	s := d.Status()
	const reason = `undoing the plugin's entry in .*/05-cilium.conflist: most likely Cilium.*set cni.exclusive=false`
	testbed.WantMatch(t, s.Contested.Reason, reason)
	testbed.WantMatch(t, s.NotReady, reason)
	if _, err := os.Stat(n.ConfFile() + ".cilium_bak"); err != nil {
		t.Errorf("Cilium is not exclusive: %v", err)
	}
	socket := "--agent-socket=" + n.AgentSocket()
	if out, err := n.Sluiced("status", "--ready", socket); err == nil {
		t.Errorf("the readiness probe succeeds: %s", out)
	}
	testbed.WantMatch(t, testbed.MustSluiced(t, n, "status", socket), "not ready: another program keeps "+reason)
	testbed.WantMatch(t, d.Log(), `level=ERROR msg="another program keeps undoing .*file=\S+05-cilium.conflist`)

	var samples, inPlace, ready int
	for start := time.Now(); time.Since(start) < 3*time.Second; samples++ {
		if _, types := chain(n.ConfDir); slices.Contains(types, "sluice") {
			inPlace++
		}
		if samples%100 == 0 && d.Status().NotReady == "" {
			ready++
		}
	}
	t.Logf("the entry was in place in %d of %d samples", inPlace, samples)
	if ready > 0 {
		t.Errorf("the daemon was ready in %d samples, and the entry in place in %d of %d", ready, inPlace, samples)
	}
}

// TestCiliumThatSharesTheNode: with cni.exclusive=false Cilium writes its file when it starts, and lets entries stay.
func TestCiliumThatSharesTheNode(t *testing.T) {
	t.Parallel()
	n, d := newNode(t, "1.0.0")
	for _, event := range []string{"Cilium starts", "Cilium starts again"} {
		cilium := testbed.Launch(n.Host, writer(t, "writers"), "cilium", n.ConfDir)
		testbed.Eventually(t, event+": Cilium has written its file", func() bool {
			return strings.Contains(cilium.Log(), "Wrote CNI configuration file")
		})
		wantChain(t, n, event, ciliumFile, "cilium-cni", "sluice")
		ready(t, d, event)
		cilium.Stop()
	}
	if c := d.Status().Contested; c != (attach.Contest{}) {
		t.Errorf("got the contest %+v, want none", c)
	}
}

// TestWritersThatWriteOnce stand in for flannel and Calico, which write their file when they start: flannel by the
// command of its DaemonSet, Calico's installer (writeCNIConfig) in place, without a rename.
func TestWritersThatWriteOnce(t *testing.T) {
	t.Parallel()
	for program, start := range map[string]func(n *testbed.Node, text string){
		"flannel": func(n *testbed.Node, text string) {
			source := filepath.Join(n.Dir, "cni-conf.json")
			write(t, source, text)
			n.Exec("cp", "-f", source, filepath.Join(n.ConfDir, "05-main.conflist"))
		},
		"calico": func(n *testbed.Node, text string) { write(t, filepath.Join(n.ConfDir, "05-main.conflist"), text) },
	} {
		n, d := newNode(t, "1.0.0")
		text := `{"name":"n","cniVersion":"0.3.1","plugins":[{"type":"` + program + `"},{"type":"portmap"}]}`
		for _, event := range []string{" starts", " starts again", " starts once more"} {
			start(n, text)
			wantChain(t, n, program+event, "05-main.conflist", program, "portmap", "sluice")
			ready(t, d, program+event)
		}
		if c := d.Status().Contested; c != (attach.Contest{}) {
			t.Errorf("%s: got the contest %+v, want none", program, c)
		}
		wantUninstalled(t, n, map[string]string{"05-main.conflist": text, primaryFile: string(n.Primary())})
	}
}

// TestThickMultus: Multus writes its .conf again when the file of the primary plugin changes, and removes it when it
// ends. Neither a copy of the file must be left then, nor anything after the uninstallation.
func TestThickMultus(t *testing.T) {
	t.Parallel()
	n, d := newNode(t, "0.3.1")
	multus := testbed.Launch(n.Host, writer(t, "writers"), "multus", n.ConfDir)
	wantChain(t, n, "Multus starts", "00-multus-by-sluice.conflist", "multus-shim", "sluice")
	ready(t, d, "Multus starts")
	testbed.Eventually(t, "the file of the primary plugin has no entry any more", func() bool {
		got, err := os.ReadFile(n.ConfFile())
		return err == nil && bytes.Equal(got, n.Primary())
	})
	changed := strings.Replace(string(n.Primary()), `"type":"bridge"`, `"type":"bridge","capabilities":{"ips":true}`, 1)
	write(t, n.ConfFile(), changed)
	testbed.Eventually(t, "Multus has the capabilities of the primary plugin, and sluice's copy too", func() bool {
		text, err := os.ReadFile(filepath.Join(n.ConfDir, "00-multus-by-sluice.conflist"))
		return err == nil && strings.Contains(string(text), `"ips":true`)
	})
	wantChain(t, n, "Multus has written its file again", "00-multus-by-sluice.conflist", "multus-shim", "sluice")
	multus.Stop()
	wantChain(t, n, "Multus is removed", primaryFile, "bridge", "sluice")
	wantUninstalled(t, n, map[string]string{primaryFile: changed})
}

// TestThinMultus: it copies the conflist of the primary plugin into its own file, which is a .conf in most versions of
// CNI. It would copy any file whose name does not begin with 00-multus.conf.
func TestThinMultus(t *testing.T) {
	t.Parallel()
	for version, want := range map[string]struct {
		file  string
		types []string
	}{
		"0.3.1": {"00-multus.conf", []string{"multus"}},
		"1.0.0": {"00-multus.conflist", []string{"multus", "sluice"}},
	} {
		t.Run(version, func(t *testing.T) {
			t.Parallel()
			n, d := newNode(t, version)
			multus := launchThin(t, n)
			path := filepath.Join(n.ConfDir, want.file)
			wantChain(t, n, "Multus starts", want.file, want.types...)
			once := func(text string) bool {
				return strings.Count(text, `"type":"sluice"`) == 1 && strings.Contains(text, `"delegates"`)
			}
			testbed.Eventually(t, "Multus' file has one entry", func() bool {
				text, err := os.ReadFile(path)
				return err == nil && once(string(text))
			})
			write(t, n.ConfFile(), strings.Replace(string(n.Primary()), `"cni0"`, `"cni1"`, 1))
			testbed.Eventually(t, "Multus has written its file again, and it has one entry", func() bool {
				text, err := os.ReadFile(path)
				return err == nil && once(string(text)) && strings.Contains(string(text), `"cni1"`)
			})
			ready(t, d, "Multus has written its file again")
			multus.Stop()
			wantChain(t, n, "Multus is removed", primaryFile, "bridge", "sluice")
			wantUninstalled(t, n, map[string]string{
				primaryFile: strings.Replace(string(n.Primary()), `"cni0"`, `"cni1"`, 1),
			})
		})
	}
}

// launchThin runs the entrypoint of the thin Multus, which wants the files of a service account in /var/run.
func launchThin(t *testing.T, n *testbed.Node) *testbed.Program {
	t.Helper()
	const script = `account=/var/run/secrets/kubernetes.io/serviceaccount
mount -t tmpfs tmpfs "$(realpath /var/run)" && mkdir -p $account && echo x > $account/token && echo x > $account/ca.crt
exec "$@"`
	return testbed.Launch(n.Host, "unshare", "--mount", "sh", "-c", script, "sh", writer(t, "thin_entrypoint"),
		"--cni-conf-dir="+n.ConfDir, "--multus-autoconfig-dir="+n.ConfDir, "--cni-bin-dir="+n.Dir,
		"--multus-cni-conf-dir="+filepath.Join(n.Dir, "multus"), "--skip-multus-binary-copy",
		"--multus-bin-file=/bin/true", "--cleanup-config-on-exit")
}

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

// wantUninstalled uninstalls, and wants these files alone to be left, apart from Multus' folder.
func wantUninstalled(t *testing.T, n *testbed.Node, want map[string]string) {
	t.Helper()
	testbed.MustSluiced(t, n, "uninstall", "--config="+testbed.ConfigFile(t, n.Config),
		"--cni-conf-dir="+n.ConfDir, "--cni-bin-dir="+t.TempDir())
	files, err := filepath.Glob(filepath.Join(n.ConfDir, "*.*"))
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		if info, err := os.Stat(f); err != nil || info.IsDir() {
			continue
		}
		got, err := os.ReadFile(f)
		if err != nil || want[filepath.Base(f)] != string(got) {
			t.Errorf("%s: got %s, %v; want %s", filepath.Base(f), got, err, want[filepath.Base(f)])
		}
		delete(want, filepath.Base(f))
	}
	if len(want) > 0 {
		t.Errorf("missing: %v", want)
	}
}
