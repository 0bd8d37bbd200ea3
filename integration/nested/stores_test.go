package nested

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-cni/sluice/integration/clients"
	"github.com/sluice-cni/sluice/integration/pki"
	"github.com/sluice-cni/sluice/integration/registry"
	"github.com/sluice-cni/sluice/integration/testbed"
)

const store = "/etc/ssl/certs/ca-certificates.crt"

// change is a script that changes the trust store of an image, as steps of builds do. It is run by a shell.
type change struct {
	name, script string
	// limit: it does not end as without sluice, as docs/limits.md says.
	limit bool
}

// changes are those that need nothing but a shell and the usual tools.
var changes = []change{
	{name: "append by the shell", script: "cat /company.crt >> " + store, limit: true},
	{name: "cut by the shell", script: ": > " + store, limit: true},
	{name: "write anew and rename, as apk does", limit: true, // the copy has the CA
		script: "cat " + store + " /company.crt > /new && mv /new " + store},
	{name: "copy, append and rename", script: "cp " + store + " /new && cat /company.crt >> /new && mv /new " + store},
	{name: "rename from the same folder",
		script: "cd /etc/ssl/certs && cp company.crt new && mv new ca-certificates.crt"},
	{name: "copy over it", script: "cp /company.crt " + store},
	{name: "install over it", script: "install -m 644 /company.crt " + store},
	{name: "append by tee", script: "tee -a " + store + " < /company.crt > /dev/null"},
	{name: "cut", script: "truncate -s 100 " + store},
	{name: "edit in place", script: "sed -i -e 1,50d " + store},
	{name: "remove", script: "rm " + store},
	{name: "remove the folder", script: "rm -rf /etc/ssl"},
	{name: "rename the folder",
		script: "mv /etc/ssl/certs /etc/ssl/old && mkdir /etc/ssl/certs && cp /company.crt " + store},
	{name: "replace by a link", script: "ln -sf /company.crt " + store},
	{name: "link from elsewhere", script: "ln " + store + " /etc/ssl/other.crt"},
	{name: "change the mode", script: "chmod 600 " + store},
	{name: "change the owner", script: "chown 1:1 " + store},
}

// storeImage is an image with a shell and the tools of this machine, a store and a company's CA. BusyBox would not do:
// its shell runs tools of its own without an exec.
func storeImage(t *testing.T) image {
	t.Helper()
	bundle, err := os.ReadFile(store)
	if err != nil {
		t.Fatal(err)
	}
	files := map[string][]byte{store: bundle, "/company.crt": company, "/etc/ssl/certs/company.crt": company}
	const programs = "dash cat mv cp sed rm mkdir ln chmod chown"
	for _, path := range append(strings.Fields("/bin/"+strings.ReplaceAll(programs, " ", " /bin/")),
		"/usr/bin/install", "/usr/bin/tee", "/usr/bin/truncate") {
		program, err := registry.Program(path)
		if err != nil {
			t.Fatal(err)
		}
		maps.Copy(files, program)
	}
	files["/bin/sh"] = files["/bin/dash"]
	return image{
		name: "a store", repository: "tools",
		content: registry.Image{Env: environment, Layers: []registry.Layer{registry.Files(files), goLayer(t)}},
	}
}

// busyboxImage is an image with a shell, a store and a company's CA.
func busyboxImage(t *testing.T) image {
	t.Helper()
	busybox, err := os.ReadFile("/bin/busybox")
	if err != nil {
		t.Fatal(err)
	}
	bundle, err := os.ReadFile(store)
	if err != nil {
		t.Fatal(err)
	}
	files := map[string][]byte{store: bundle, "/company.crt": company}
	const programs = "sh cat mv cp sed rm mkdir ln chmod mkfifo truncate nc mount sleep"
	for name := range strings.FieldsSeq(programs) {
		files["/bin/"+name] = busybox
	}
	return image{
		name: "BusyBox with a store", repository: "store",
		content: registry.Image{Env: environment, Layers: []registry.Layer{registry.Files(files), goLayer(t)}},
	}
}

// company is a CA of the user's own.
var company = pki.NewCA("The company's CA").Cert

// connect is a command that makes a connection: the CA is in the container by then, if ever.
var connect = clients.GoFile + " " + clients.RunCommand + " " + url + " " + clients.Go.Name

// ended is the end of a step that changes the store.
type ended struct {
	exitCode string
	files    map[string]string // those of its layer, with what is in them
}

var exitCode = regexp.MustCompile(`the exit code is (\d+)`)

// apply runs a change in a step of a build by a dockerd, and returns its end. tag is the image's name.
func (l *lab) apply(docker *testbed.Docker, builder, from string, c change, tag string) ended {
	l.t.Helper()
	step := testbed.JSON([]string{
		"sh", "-c", connect + "\n(" + c.script + ")\necho the exit code is $?\n" + connect,
	})
	other := *l
	other.docker = docker
	w := way{program: builder}
	dockerfile := "FROM " + registryAddress + "/" + from + "\nRUN " + step + "\n"
	out, err := other.build(w, dockerfile, tag, w.hostsOptions(server)...)
	if err != nil {
		l.t.Fatalf("%s: %v\n%s", c.name, err, out)
	}
	code := exitCode.FindStringSubmatch(out)
	if code == nil {
		l.t.Fatalf("%s: the output has no exit code:\n%s", c.name, out)
	}
	_, layers, err := l.images.Pushed(tag)
	if err != nil {
		l.t.Fatal(err)
	}
	e := ended{code[1], map[string]string{}}
	for _, layer := range layers {
		if err := describe(layer, e.files); err != nil {
			l.t.Fatalf("%s: the layer: %v", c.name, err)
		}
	}
	return e
}

// describe adds the files of a compressed layer. Times are left out.
func describe(layer []byte, files map[string]string) error {
	r, err := gzip.NewReader(bytes.NewReader(layer))
	if err != nil {
		return err
	}
	for archive := tar.NewReader(r); ; {
		header, err := archive.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		hash := sha256.New()
		if _, err := io.Copy(hash, archive); err != nil {
			return err
		}
		files[header.Name] = fmt.Sprintf("%c %o %d:%d %s %x",
			header.Typeflag, header.Mode, header.Uid, header.Gid, header.Linkname, hash.Sum(nil))
	}
}

// TestStoreChanges: steps of builds that change the trust store end as without sluice, and leave the same files. The
// limits do not.
func TestStoreChanges(t *testing.T) {
	newLab(t, inspect()).applyAll(storeImage(t), changes, func(c change, got, want ended, found []string) {
		if all := list(want.files); !strings.Contains(all, "etc/ssl/") && !strings.Contains(all, "etc/.wh.ssl") {
			t.Errorf("%s without sluice changes no store:\n%s", c.name, list(want.files))
		}
		same := got.exitCode == want.exitCode && maps.Equal(got.files, want.files) && found == nil
		if same == c.limit {
			t.Errorf("%s: got exit code %s, the traces %q of the CA and the files\n%swant %s, none and\n%s"+
				"unless it is a limit: %t", c.name, got.exitCode, found, list(got.files), want.exitCode,
				list(want.files), c.limit)
		}
	})
}

// applyAll runs changes in builds by both builders of a dockerd in the captured pod, and of one in a pod that is not
// captured. It calls check with both ends, and with the traces of the CA in the first image.
func (l *lab) applyAll(i image, all []change, check func(c change, got, want ended, found []string)) {
	l.t.Helper()
	without := l.startDocker(l.Node.AddBystander())
	l.publish(i)
	s := newTraces(l.t, l.ProxyCA())
	for _, builder := range []string{classic, buildKit} {
		for number, c := range all {
			with, plain := fmt.Sprintf("with-%d", number), fmt.Sprintf("without-%d", number)
			got := l.apply(l.docker, builder, i.repository, c, with)
			want := l.apply(without, builder, i.repository, c, plain)
			c.name += " by " + builder
			check(c, got, want, l.inPushed(s, with))
		}
	}
}

func list(files map[string]string) string {
	var out strings.Builder
	for _, name := range slices.Sorted(maps.Keys(files)) {
		fmt.Fprintf(&out, "%s %s\n", name, files[name])
	}
	return out.String()
}
