package nested

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sluice-cni/sluice/integration/pki"
	"github.com/sluice-cni/sluice/integration/testbed"
	"github.com/sluice-cni/sluice/plugin/truststore"
)

// TestTouchesStore: the arguments of a program lead to a store, or they do not.
func TestTouchesStore(t *testing.T) {
	w, p := newTestWatcher(t), newPod(t)
	must(t, w.watch(p.netns))
	// A mount as the daemon makes it.
	p.run("mkdir $root/mnt && mount -t tmpfs sluice-ca $root/mnt && cp $root/" + store + " $root/mnt/copy && " +
		"mount --bind $root/mnt/copy $root/" + store + " && umount --lazy $root/mnt")
	p.run("mkdir $root/etc/other && ln -s /" + store + " $root/link && ln -s etc/ssl/certs $root/folder && " +
		"ln -s / $root/etc/other/up")
	p.wantEnded(2)
	cases := []struct {
		cwd, arguments string
		want           bool
	}{
		{"/", "/" + store, true},
		{"/", "/tmp/other /" + store, true},
		{"/etc/ssl", "certs/ca-certificates.crt", true},
		{"/etc/other", "../ssl/certs/ca-certificates.crt", true},
		{"/etc/other", "up/../link", true}, // not /etc/other/link
		{"/", "/link", true},
		{"/", "folder/new.pem", true},
		{"/", "/etc/ssl/certs/new.pem", true},
		{"/", "-r /etc/ssl/certs/", true},
		{"/", "-r /etc", true},
		{"/etc/ssl", ".", true},
		{"/", "-t/etc/ssl/certs", true},
		{"/", "--target-directory=/etc/ssl/certs", true},
		{"/tmp", "../../../.." + "/" + store, true}, // the root ends the way
		{"/", "/tmp/other", false},
		{"/tmp", "ca-certificates.crt", false},
		{"/", "-r /etc/other", false},
		{"/etc", "ssl2 missing/ssl/certs", false},
		{"/", "-- -", false},
		{"/etc/ssl/certs", "/tmp", false},
	}
	script := ":" // without a path the shell of BusyBox would run its own rm, without an exec
	for _, c := range cases {
		script += fmt.Sprintf("; (cd %s; /bin/rm -i %s </out)", c.cwd, c.arguments) // the answer is no
	}
	p.start(script + "; exit 0")
	for i := -1; i < len(cases); i++ {
		e, err := w.next()
		must(t, err)
		must(t, w.settle(e.Mount, knownSettled))
		held, err := openProcess("/proc", e.PID, e.Start)
		must(t, err)
		if i >= 0 {
			c := cases[i]
			known := &container{stores: []string{"/" + store}}
			u, err := known.updateOf(held, "rm", nil)
			must(t, err)
			if (u == updateAll) != c.want || e.name() != "rm" {
				t.Errorf("%s in %s, with %s: got %d, want an update: %t", e.Name, c.cwd, c.arguments, u, c.want)
			}
		}
		must(t, held.resume())
		held.close()
	}
	p.wantEnded(3)
	wantNone(t, w)
}

// TestEditors: programs change the store as in a container without the CA, and later programs have the CA again. They
// are named by their paths, because the shell of BusyBox would run its own ones, without an exec.
func TestEditors(t *testing.T) {
	const other = "/bin/cp /new.pem /etc/ssl/certs/other.crt; "
	for name, c := range map[string]struct {
		script string
		store  string // its contents then, or one of these
	}{
		"remove":            {"/bin/rm /" + store, "none"},
		"remove the folder": {"/bin/rm -r /etc/ssl", "none"},
		"rename":            {"/bin/mv /new.pem /" + store, "new"},
		"copy":              {"/bin/cp /new.pem /" + store, "new"},
		"copy away":         {"/bin/cp /" + store + " /tmp/copy; /bin/mv /tmp/copy /" + store, "old"},
		"link":              {"/bin/ln -sf other.crt /" + store, "new"},
		"edit":              {"cd /etc/ssl/certs; /bin/sed -i -e 1d ca-certificates.crt", "shorter"},
		"write":             {"cat /new.pem | /bin/tee /" + store, "new"},
		"cut":               {"/bin/truncate -s 0 /" + store, "empty"},
		"change the mode":   {"/bin/chmod 600 /" + store, "old"},
		"change the owner":  {"/bin/chown 1 /" + store, "old"},
	} {
		t.Run(name, func(t *testing.T) {
			p := newPod(t)
			newEngine(t, p)
			added := pki.NewCA("a company").Cert
			old, err := os.ReadFile(filepath.Join(p.root, store))
			must(t, err)
			must(t, os.WriteFile(filepath.Join(p.root, "new.pem"), added, 0o644))
			_, shorter, _ := strings.Cut(string(old), "\n")
			contents := map[string]string{"old": string(old), "new": string(added), "shorter": shorter}
			p.start(other + "(" + c.script + ") >/tmp/log && grep -c \"" + marker + "\" /" + store + " >>/out; exit 0")
			p.wantEnded(1)
			text, err := os.ReadFile(filepath.Join(p.root, store))
			if c.store == "none" {
				if !os.IsNotExist(err) {
					t.Errorf("the store is there, %v", err)
				}
				return
			}
			must(t, err)
			if string(text) != contents[c.store] {
				t.Errorf("got the store\n%s\nwant\n%s", text, contents[c.store])
			}
			if got := p.output(); got != "1\n" {
				t.Errorf("the store has the CA %q times for the next program, want once", got)
			}
		})
	}
}

// TestOtherEditors: a program that changes other files goes on, and nothing else is done.
func TestOtherEditors(t *testing.T) {
	p := newPod(t)
	e := newEngine(t, p)
	const wait = "while [ ! -e /tmp/go ]; do sleep 0.1; done; /bin/rm /tmp/go; "
	p.start("echo up >/out; " + wait + "/bin/cp /new.pem /tmp/a; /bin/chmod 600 /tmp/a; /bin/mv /tmp/a /tmp/b; " +
		"/bin/rm -r /tmp/b; echo done >/out; " + wait)
	testbed.Eventually(t, "the container runs", func() bool { return p.output() == "up\n" })
	before := e.changes.Load()
	must(t, os.WriteFile(filepath.Join(p.root, "new.pem"), nil, 0o644))
	must(t, os.WriteFile(filepath.Join(p.root, "tmp/go"), nil, 0o644))
	testbed.Eventually(t, "the programs have run", func() bool { return p.output() == "done\n" })
	if got := e.changes.Load(); got != before {
		t.Errorf("the state may have changed %d times, want none", got-before)
	}
	if containers, _ := e.State("uid"); len(containers) != 1 || containers[0].State != truststore.Trusted {
		t.Errorf("got %+v, want a container that trusts the CA", containers)
	}
	must(t, os.WriteFile(filepath.Join(p.root, "tmp/go"), nil, 0o644))
	p.wantEnded(1)
}
