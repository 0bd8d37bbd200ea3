package truststore

import (
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/sluice-cni/sluice/integration/clients"
	"github.com/sluice-cni/sluice/integration/oci"
	"github.com/sluice-cni/sluice/integration/testbed"
	"github.com/sluice-cni/sluice/plugin/truststore"
)

// TestUpdate: the CA stays when the container makes its stores anew.
func TestUpdate(t *testing.T) {
	ca := newAuthority(t)
	c := newIdle(t, oci.Machine(t))
	adjust(newSluiced(t, ca), c, modes[0])
	c.Start()
	for _, args := range [][]string{{"update-ca-certificates"}, {"update-ca-certificates", "--fresh"}} {
		if out, err := c.Exec(nil, "", args...); err != nil {
			t.Fatalf("%v: %v\n%s", args, err, out)
		}
		wantTrust(t, c, ca)
	}
}

// TestRestricted: containers whose root cannot be written, whose processes are not root, or that are in a user
// namespace get the CA like others.
func TestRestricted(t *testing.T) {
	for _, test := range []struct {
		name                           string
		readOnly, user, userNamespaced bool
	}{
		{name: "a read-only root", readOnly: true},
		{name: "a user", user: true},
		{name: "a user namespace", userNamespaced: true},
		{name: "all of them", readOnly: true, user: true, userNamespaced: true},
	} {
		t.Run(test.name, func(t *testing.T) {
			ca := newAuthority(t)
			sluiced := newSluiced(t, ca)
			prepare := oci.New
			if test.userNamespaced {
				prepare = oci.NewInUserNamespace
			}
			c := addBinary(t, prepare(t, oci.Machine(t), clients.GoFile, idleCommand))
			c.Spec.Root.Readonly = test.readOnly
			if test.user {
				c.SetUser(1000)
			}
			adjust(sluiced, c, modes[0])
			c.Start()
			if test.userNamespaced { // the hook runs in the namespace, and cannot write into sluiced's folder
				if report := sluiced.Report(c); report.State != truststore.Unknown {
					t.Errorf("before the repair: got %s", summary(report))
				}
				wantUnchanged(t, sluiced.Repair(c))
			} else if report := sluiced.Report(c); report.State != truststore.Trusted {
				t.Errorf("got %s", summary(report))
			}
			wantTrust(t, c, ca)
		})
	}
}

// TestSmallMemory: the hook runs in the container's cgroup, and is content with little. With 8 MiB the kernel sometimes
// ends runc's own first process.
func TestSmallMemory(t *testing.T) {
	sluiced := newSluiced(t, newAuthority(t))
	c := oci.New(t, oci.Machine(t), "/bin/sleep", "60")
	limit := int64(12 << 20)
	c.Spec.Linux.Resources = &specs.LinuxResources{Memory: &specs.LinuxMemory{Limit: &limit, Swap: &limit}}
	adjust(sluiced, c, modes[0])
	c.Start()
	if report := sluiced.Report(c); report.State != truststore.Trusted {
		t.Errorf("got %s", summary(report))
	}
}

// TestLateRepair: a repair is late if it changes a store that programs may have read, and stays late.
func TestLateRepair(t *testing.T) {
	sluiced := newSluiced(t, newAuthority(t))
	for _, test := range []struct {
		name string
		mode int
		late bool
	}{{"with the hook", 0, false}, {"without", 2, true}} {
		c := newIdle(t, oci.Machine(t))
		adjust(sluiced, c, modes[test.mode])
		c.Start()
		for range 2 {
			if report := sluiced.Repair(c, "--late"); report.Late != test.late || report.State != truststore.Trusted {
				t.Errorf("%s: got %+v, want late: %t", test.name, report, test.late)
			}
		}
		if report := sluiced.Repair(c); report.Late {
			t.Errorf("%s: got %+v of a repair in time", test.name, report)
		}
	}
}

// wantUnchanged fails unless a repair has found the CA in all stores.
func wantUnchanged(t *testing.T, report truststore.Report) {
	t.Helper()
	changed := slices.ContainsFunc(report.Stores, func(s truststore.Store) bool {
		return s.Action != truststore.Present
	})
	if report.State != truststore.Trusted || len(report.Stores) == 0 || changed {
		t.Errorf("got %s, want the state trusted and no change", summary(report))
	}
}

// TestRepairInUserNamespace: a container in a user namespace that was created without the hook gets the CA later. New
// files in it belong to its own root.
func TestRepairInUserNamespace(t *testing.T) {
	ca := newAuthority(t)
	sluiced := newSluiced(t, ca)
	start := func(readOnly bool) *oci.Container {
		c := addBinary(t, oci.NewInUserNamespace(t, oci.Machine(t), clients.GoFile, idleCommand))
		c.Spec.Root.Readonly = readOnly
		adjust(sluiced, c, modes[2]) // the environment, without the hook
		c.Start()
		return c
	}
	c := start(false)
	if report := sluiced.Repair(c); report.State != truststore.Trusted {
		t.Errorf("got %s", summary(report))
	}
	wantTrust(t, c, ca)
	const script = "stat -c %U /etc/ssl/certs/ca-certificates.crt /usr/local/share/ca-certificates/sluice-ca-*.crt"
	if out, err := c.Exec(nil, "", "sh", "-c", script); err != nil || out != "root\nroot\n" {
		t.Errorf("the owners of new files: %v, got %q", err, out)
	}
	wantUnchanged(t, sluiced.Repair(c))
	// The node's root cannot make the copy to be mounted: it is nobody to the container's /dev.
	if report := sluiced.Repair(start(true)); report.State != truststore.FilesOnly {
		t.Errorf("a read-only root: got %s", summary(report))
	}
}

// wantTrust fails unless all clients that a container has trust the CA.
func wantTrust(t *testing.T, c *oci.Container, ca authority) {
	t.Helper()
	for _, client := range clients.In(c.Root) {
		if got := ca.get(t, c, client); !got.ok {
			t.Errorf("%s does not trust the CA: %s", client.Name, lastLines(got.output))
		}
	}
}

// TestMitmproxy: clients accept the certificates that mitmproxy makes, and refuse them in other containers.
func TestMitmproxy(t *testing.T) {
	server := newAuthority(t)
	const address = "127.0.0.1:8443"
	confdir := t.TempDir()
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), testbed.Mitmproxy(t, "", "mitmdump"), "--quiet",
		"--mode", "reverse:"+server.url, "--ssl-insecure", "--listen-host", host, "--listen-port", port,
		"--set", "confdir="+confdir)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill() // it may have ended
		_ = cmd.Wait()         // it was killed
	})
	testbed.Eventually(t, "mitmdump listens", func() bool {
		conn, err := net.Dial("tcp", address)
		if err == nil {
			_ = conn.Close() // nothing was written
		}
		return err == nil
	})
	pem, err := os.ReadFile(filepath.Join(confdir, "mitmproxy-ca-cert.pem"))
	if err != nil {
		t.Fatal(err)
	}
	ca := authority{pem: pem, url: "https://localhost:" + port + "/"}
	sluiced := newSluiced(t, ca)
	with, without := newIdle(t, oci.Machine(t)), newIdle(t, oci.Machine(t))
	adjust(sluiced, with, modes[0])
	with.Start()
	without.Start()
	for _, client := range clients.In(with.Root) {
		if out, ok := client.Try(with.Exec, ca.url); !ok {
			t.Errorf("%s does not trust the CA: %s", client.Name, lastLines(out))
		}
		if out, ok := client.Try(without.Exec, ca.url); ok {
			t.Errorf("%s trusts the CA though nothing is added: %s", client.Name, out)
		}
	}
}
