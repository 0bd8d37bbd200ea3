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
type change struct{ name, script string }

// changes are those that need nothing but a shell and the usual tools.
var changes = []change{
	{"append", "cat /company.crt >> " + store},
	{"write anew and rename, as apk does", "cat " + store + " /company.crt > /new && mv /new " + store},
	{"rename from the same folder",
		"cat " + store + " /company.crt > " + store + ".new && mv " + store + ".new " + store},
	{"copy over it", "cp /company.crt " + store},
	{"truncate", ": > " + store},
	{"edit in place", "sed -i -e 1,50d " + store},
	{"remove", "rm " + store},
	{"remove the folder", "rm -rf /etc/ssl"},
	{"rename the folder", "mv /etc/ssl/certs /etc/ssl/old && mkdir /etc/ssl/certs && cp /company.crt " + store},
	{"replace by a link", "ln -sf /company.crt " + store},
	{"link from elsewhere", "ln " + store + " /etc/ssl/other.crt"},
	{"change the mode", "chmod 600 " + store},
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
	out, err := other.build(w, dockerfile, tag, w.hostsOption()...)
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

// TestStoreChanges: steps of builds that change the trust store end as without sluice, and leave the same files.
func TestStoreChanges(t *testing.T) {
	l := newLab(t, inspect())
	without := l.startDocker(l.Node.AddBystander())
	i := busyboxImage(t)
	l.publish(i)
	s := newTraces(t, l.ProxyCA())
	for _, builder := range []string{classic, buildKit} {
		for number, c := range changes {
			with, plain := fmt.Sprintf("with-%d", number), fmt.Sprintf("without-%d", number)
			got := l.apply(l.docker, builder, i.repository, c, with)
			want := l.apply(without, builder, i.repository, c, plain)
			if all := list(want.files); !strings.Contains(all, "etc/ssl/") && !strings.Contains(all, "etc/.wh.ssl") {
				t.Errorf("%s by %s without sluice changes no store:\n%s", c.name, builder, list(want.files))
			}
			if got.exitCode != want.exitCode || !maps.Equal(got.files, want.files) {
				t.Errorf("%s by %s: got exit code %s and the files\n%swant %s and\n%s", c.name, builder,
					got.exitCode, list(got.files), want.exitCode, list(want.files))
			}
			if found := l.inPushed(s, with); found != nil {
				t.Errorf("%s by %s: %q", c.name, builder, found)
			}
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
