package nested

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"github.com/sluice-cni/sluice/integration/runner"
)

// hostile is a container whose trust store is a trap.
type hostile struct {
	name string
	// prepare is a script of a build that makes the store, and attack runs in the container beside the client.
	prepare, attack string
	options         []string // of docker run
}

// outside is the part of the machine that containers may reach, or pretend to: a folder with two files.
type outside struct{ folder, bundle, secret string }

// hostiles are the traps. Each container ends by itself.
func hostiles(o outside) []hostile {
	// Paths make the shell of BusyBox start the programs. It runs others itself, and the mounts do not step aside.
	const folder = "/etc/ssl/certs"
	return []hostile{
		{name: "a link to a file of the machine", prepare: "/bin/ln -sf " + o.secret + " " + store},
		{name: "a relative link out", prepare: "/bin/ln -sf ../../../../../../../.." + o.secret + " " + store},
		{name: "a link to the root of the first process", prepare: "/bin/ln -sf /proc/1/root" + o.secret + " " + store},
		{name: "a link to a descriptor", prepare: "/bin/ln -sf /proc/self/fd/0 " + store},
		{name: "a folder that is a link out",
			prepare: "/bin/rm -rf " + folder + " && /bin/ln -s " + o.folder + " " + folder},
		{name: "a loop of links",
			prepare: "/bin/ln -sf " + store + " " + store + ".a && /bin/ln -sf " + store + ".a " + store},
		{name: "a FIFO", prepare: "/bin/rm " + store + " && /bin/mkfifo " + store},
		{name: "an endless device", prepare: "/bin/ln -sf /dev/zero " + store},
		// A build would write all of it.
		{name: "a large sparse file", attack: "truncate -s 1024G " + store + "\n"},
		{name: "a folder in place of the file", prepare: "/bin/rm " + store + " && /bin/mkdir " + store},
		{name: "a certificate that is none", prepare: "/bin/rm " + store +
			" && echo '-----BEGIN CERTIFICATE-----' > " + store},
		{name: "a file of the machine as a volume", options: []string{"--volume", o.bundle + ":" + store}},
		{name: "a folder of the machine as a volume", options: []string{"--volume", o.folder + ":" + folder}},
		{name: "a shared mount", attack: "cp /company.crt " + store + "\n",
			options: []string{"--volume", runner.SharedMount + ":" + folder + ":rshared"}},
		{name: "a volume", options: []string{"--volume", "stores:/etc/ssl"}},
		{name: "a link that is swapped", attack: "while :; do ln -sf " + o.secret + " " + store + "; rm " + store +
			"; cp /company.crt " + store + "; done & "},
		{name: "a folder that is swapped", attack: "while :; do mv " + folder + " /etc/ssl/a; ln -s " + o.folder + " " +
			folder + "; rm " + folder + "; mv /etc/ssl/a " + folder + "; done & "},
	}
}

// TestHostileStores: traps in the place of a trust store change nothing outside the container, and stop nothing.
func TestHostileStores(t *testing.T) {
	l := newLab(t, inspect())
	i := busyboxImage(t)
	l.publish(i)
	// dockerd shares this folder with the machine.
	o := outside{folder: filepath.Join(l.pod.DockerDir(), "outside")}
	o.bundle, o.secret = filepath.Join(o.folder, filepath.Base(store)), filepath.Join(o.folder, "secret")
	if err := os.Mkdir(o.folder, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, file := range []string{o.bundle, o.secret} {
		if err := os.WriteFile(file, company, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	l.mustRun(l.docker.Command("pull", "--quiet", registryAddress+"/"+i.repository))
	before := l.stateOf(t)
	for _, h := range hostiles(o) {
		t.Run(h.name, func(t *testing.T) {
			l.attack(t, i, h)
			for _, file := range []string{o.bundle, o.secret} {
				got, err := os.ReadFile(file)
				if err != nil || !bytes.Equal(got, company) {
					t.Errorf("%s has changed: %v\n%s", file, err, got)
				}
			}
			entries, err := os.ReadDir(o.folder)
			if err != nil || len(entries) != 2 {
				t.Errorf("the folder outside has the entries %v, %v", entries, err)
			}
			l.wantState(t, before)
		})
	}
}

// attack runs a hostile container until it has connected some times. Its connections send nothing: a client that reads
// the store would hang in some of the traps.
func (l *lab) attack(t *testing.T, i image, h hostile) {
	t.Helper()
	name := registryAddress + "/" + i.repository
	if h.prepare != "" {
		dir := l.context("FROM " + name + "\nRUN " + h.prepare + "\n")
		name = "hostile"
		if out, err := run(l.docker.Command("build", "--no-cache", "--tag", name, dir)); err != nil {
			t.Fatalf("building the image: %v\n%s", err, out)
		}
	}
	const connects = "for i in 1 2 3 4 5; do nc " + server + " 443 < /dev/null || exit 1; done"
	args := append([]string{"run", "--rm", "--add-host", hosts}, h.options...)
	if out, err := run(l.docker.Command(append(args, name, "sh", "-c", h.attack+connects)...)); err != nil {
		t.Errorf("running the container: %v\n%s", err, out)
	}
}
