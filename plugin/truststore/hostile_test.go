package truststore

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-cni/sluice/integration/pki"
)

// TestHostileFiles: the store cannot be used, the run ends, and the other stores get the CA.
func TestHostileFiles(t *testing.T) {
	image := string(pki.NewCA("image").Cert)
	at := func(root, path string) string { return filepath.Join(root, path) }
	for _, test := range []struct {
		name  string
		make  func(t *testing.T, file, root string) error
		error string // in the report
	}{
		{"FIFO", func(_ *testing.T, file, _ string) error { return unix.Mkfifo(file, 0o666) }, "not a regular file"},
		{"device", func(_ *testing.T, file, _ string) error {
			return unix.Mknod(file, unix.S_IFCHR|0o666, int(unix.Mkdev(1, 5)))
		}, "not a regular file"},
		{"block device", func(_ *testing.T, file, _ string) error {
			return unix.Mknod(file, unix.S_IFBLK|0o666, int(unix.Mkdev(7, 99)))
		}, "not a regular file"},
		{"socket", func(_ *testing.T, file, _ string) error { return unix.Mknod(file, unix.S_IFSOCK|0o666, 0) },
			"not a regular file"},
		{"folder", func(_ *testing.T, file, _ string) error { return os.Mkdir(file, 0o755) }, "not a regular file"},
		{"link to itself", func(_ *testing.T, file, _ string) error { return os.Symlink(filepath.Base(file), file) },
			"too many levels"},
		{"link to a FIFO", func(_ *testing.T, file, root string) error {
			if err := unix.Mkfifo(at(root, "fifo"), 0o666); err != nil {
				return err
			}
			return os.Symlink("/fifo", file)
		}, "not a regular file"},
		{"huge file", func(_ *testing.T, file, _ string) error {
			if err := os.WriteFile(file, nil, 0o644); err != nil {
				return err
			}
			return os.Truncate(file, 1<<40)
		}, "more than"},
		{"magic link", func(t *testing.T, file, root string) error {
			if err := os.Mkdir(at(root, "proc"), 0o755); err != nil {
				return err
			}
			mount(t, "proc", at(root, "proc"), "proc", 0, "")
			return os.Symlink("/proc/self/root"+filepath.Join(root, "secret"), file)
		}, "too many levels"},
		{"file of the kernel", func(t *testing.T, file, root string) error {
			if err := os.Mkdir(at(root, "proc"), 0o755); err != nil {
				return err
			}
			mount(t, "proc", at(root, "proc"), "proc", 0, "")
			return os.Symlink("/proc/kmsg", file)
		}, "file system of the kernel"},
	} {
		t.Run(test.name, func(t *testing.T) {
			root := tree(t, map[string]string{certs + "/": "", rhelBundle: image, "/secret": image})
			if err := test.make(t, at(root, debianBundle), root); err != nil {
				t.Fatal(err)
			}
			ca := pki.NewCA("proxy").Cert
			report := add(t, root, ca)
			wantState(t, report, FilesOnly)
			wantAction(t, report, debianBundle, Failed)
			if got := report.store(t, debianBundle).Error; !strings.Contains(got, test.error) {
				t.Errorf("got the error %q, want %q", got, test.error)
			}
			wantCertificates(t, read(t, root, rhelBundle), []byte(image), ca)
			if got := read(t, root, "/secret"); got != image {
				t.Error("the file that a magic link leads to has changed")
			}
		})
	}
}

// TestNothingOutside: a root whose links all lead out changes nothing out there.
func TestNothingOutside(t *testing.T) {
	ca := pki.NewCA("proxy").Cert
	image := string(pki.NewCA("image").Cert) + string(ca) // a store that is read is reported as one that has the CA
	outside := tree(t, map[string]string{
		"bundle.pem": image, "certs/11112222.0": image, "anchors/a.crt": image,
		"cacerts":                          string(testFile(t, "trusted.jks")),
		"site-packages/certifi/cacert.pem": image,
	})
	up := strings.Repeat("../", 40)
	root := tree(t, map[string]string{
		debianBundle: "-> " + outside + "/bundle.pem", "/etc/ssl/cert.pem": "-> " + up + outside + "/bundle.pem",
		"/etc/pki/tls":         "-> " + up + outside,
		"/etc/ca-certificates": "-> " + outside, "/var/lib/ca-certificates/pem": "-> " + outside + "/certs",
		debianAnchor: "-> " + outside + "/anchors", "/usr/bin/dpkg": "", rhelAnchor: "-> " + up + outside + "/anchors",
		cacerts: "-> " + up + outside + "/cacerts", "/opt/venv": "-> " + outside,
		"/usr/lib/jvm/a/lib/security": "-> " + outside, "/run/bundle.pem": "-> " + outside + "/bundle.pem",
	})
	before := snapshot(t, outside)
	report := addWith(t, root, ca, Options{Fallback: "/run/bundle.pem", Named: []string{outside + "/bundle.pem"}})
	if report.Error != "" {
		t.Errorf("got %+v", report)
	}
	if after := snapshot(t, outside); !slices.Equal(before, after) {
		t.Errorf("outside of the root:\ngot  %v\nwant %v", after, before)
	}
	for _, s := range report.Stores {
		if s.Action == Appended && s.Kind != Anchor || s.Action == Bound || s.Action == Present {
			t.Errorf("a store outside of the root: %+v", s)
		}
	}
}

// snapshot lists the files below a folder with their hashes and their times of change.
func snapshot(t *testing.T, folder string) []string {
	t.Helper()
	var found []string
	err := filepath.WalkDir(folder, func(path string, e fs.DirEntry, err error) error {
		if err != nil || !e.Type().IsRegular() {
			found = append(found, path)
			return err
		}
		var info unix.Stat_t
		if err := unix.Lstat(path, &info); err != nil {
			return err
		}
		data, err := os.ReadFile(path)
		sum := sha256.Sum256(data)
		found = append(found, path+" "+hex.EncodeToString(sum[:])+" "+time.Unix(info.Ctim.Unix()).String())
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return found
}

// TestNoSpace: a store on a full file system is mounted over, and nothing is left of the attempt to write it.
func TestNoSpace(t *testing.T) {
	image, ca := pki.NewCA("image").Cert, pki.NewCA("proxy").Cert
	root := t.TempDir()
	mount(t, "tmpfs", root, "tmpfs", 0, "size=64k")
	for _, folder := range []string{"dev", certs} {
		if err := os.MkdirAll(filepath.Join(root, folder), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	mount(t, "tmpfs", filepath.Join(root, "dev"), "tmpfs", 0, "")
	if err := os.WriteFile(filepath.Join(root, debianBundle), image, 0o644); err != nil {
		t.Fatal(err)
	}
	fill, err := os.Create(filepath.Join(root, "fill"))
	if err != nil {
		t.Fatal(err)
	}
	_, err = fill.Write(make([]byte, 1<<20))
	if errors.Join(err, fill.Close()) == nil {
		t.Fatal("the file system is not full")
	}
	report := add(t, root, ca)
	t.Cleanup(func() { unmountAll(t, root, debianBundle) })
	wantAction(t, report, debianBundle, Bound)
	wantCertificates(t, read(t, root, debianBundle), image, ca)
	for _, folder := range []string{certs, "dev"} {
		if names := oursIn(t, root, folder); len(names) > 0 {
			t.Errorf("left in %s: %v", folder, names)
		}
	}
}

func TestImmutableFile(t *testing.T) {
	image, ca := pki.NewCA("image").Cert, pki.NewCA("proxy").Cert
	root := tree(t, map[string]string{debianBundle: string(image), "/dev/": ""})
	mount(t, "tmpfs", filepath.Join(root, "dev"), "tmpfs", 0, "")
	f, err := os.Open(filepath.Join(root, debianBundle))
	if err != nil {
		t.Fatal(err)
	}
	setFlags(t, f, unix.STATX_ATTR_IMMUTABLE)
	t.Cleanup(func() {
		setFlags(t, f, 0)
		_ = f.Close() // only its flags were set
	})
	report := add(t, root, ca)
	t.Cleanup(func() { unmountAll(t, root, debianBundle) })
	wantAction(t, report, debianBundle, Bound)
	wantCertificates(t, read(t, root, debianBundle), image, ca)
	if names := oursIn(t, root, certs); len(names) > 0 {
		t.Errorf("left beside the file: %v", names)
	}
}

// setFlags sets the inode flags; FS_IMMUTABLE_FL has the value of STATX_ATTR_IMMUTABLE.
func setFlags(t *testing.T, f *os.File, flags int) {
	t.Helper()
	if err := unix.IoctlSetPointerInt(int(f.Fd()), unix.FS_IOC_SETFLAGS, flags); err != nil {
		t.Errorf("setting inode flags: %v", err)
	}
}

func TestTenThousandCertificates(t *testing.T) {
	image, ca := pki.NewCA("image").Cert, pki.NewCA("proxy").Cert
	root := tree(t, map[string]string{debianBundle: strings.Repeat(string(image), 10_000)})
	wantState(t, add(t, root, ca), Trusted)
	got := read(t, root, debianBundle)
	if strings.Count(got, pemBegin) != 10_001 || !strings.HasSuffix(got, string(ca)) {
		t.Errorf("got %d certificates", strings.Count(got, pemBegin))
	}
}

// TestFolderWithTooManyEntries: a directory is read up to a bound only.
func TestFolderWithTooManyEntries(t *testing.T) {
	root := tree(t, map[string]string{certs + "/": ""})
	for i := range maxEntries + 10 {
		if err := os.Symlink("nowhere", filepath.Join(root, certs, "link"+strconv.Itoa(i))); err != nil {
			t.Fatal(err)
		}
	}
	if report := add(t, root, pki.NewCA("proxy").Cert); report.Error != "" {
		t.Errorf("got %+v", report)
	}
}

// TestSearch: folders of packages are found wherever people make them, and not in folders that have none.
func TestSearch(t *testing.T) {
	image := string(pki.NewCA("image").Cert)
	files := map[string]string{
		"/opt/conda/conda-meta/": "", "/opt/conda/envs/a/conda-meta/": "", "/srv/app/pyvenv.cfg": "",
	}
	want := []string{
		"/opt/conda/envs/a/lib/python3.11/site-packages",
		"/opt/conda/lib/python3.11/site-packages",
		"/opt/conda/pkgs/certifi-1/site-packages",
		"/opt/lib/python-apps/x/lib/python3.9/site-packages",
		"/opt/pypy/lib/pypy3.10/site-packages",
		"/root/.cache/pypoetry/virtualenvs/a/lib/python3.12/site-packages",
		"/root/.local/share/pipx/venvs/a/lib/python3.12/site-packages",
		"/srv/app/lib/python3.13t/site-packages",
		"/srv/app/sub/.venv/lib64/python3.12/site-packages",
		"/usr/lib/python3.12/site-packages",
		"/usr/lib/python3/dist-packages",
	}
	for _, packages := range want {
		files[packages+"/certifi/cacert.pem"] = image
	}
	for _, packages := range []string{
		"/opt/conda/share/x/site-packages", "/srv/app/bin/site-packages", "/usr/lib/python3.12/test/site-packages",
		"/usr/lib/x86_64-linux-gnu/site-packages", "/usr/share/x/site-packages", "/srv/node_modules/x/site-packages",
	} {
		files[packages+"/certifi/cacert.pem"] = image
	}
	r, err := openRoot(tree(t, files))
	if err != nil {
		t.Fatal(err)
	}
	defer r.close()
	found, unsearched := r.findCertifi(t.Context())
	var got []string
	for _, path := range found {
		if packages, ok := strings.CutSuffix(path, "-packages/certifi/cacert.pem"); ok {
			packages += "-packages"
			got = append(got, packages)
		}
	}
	slices.Sort(got)
	if !slices.Equal(got, want) || unsearched != "" {
		t.Errorf("got %q\nwant %q, %s", got, want, unsearched)
	}
}

// TestMalformedKeystores: no prefix of a keystore and no changed byte does harm.
func TestMalformedKeystores(t *testing.T) {
	wanted, err := parseCA(pki.NewCA("proxy").Cert)
	if err != nil {
		t.Fatal(err)
	}
	for _, k := range keystores {
		original := testFile(t, k.file)
		for i := 0; i < len(original); i += 1 + len(original)/12 {
			r := &run{wanted: wanted}
			if _, ok := changeKeystore(t, r, original[:i]); ok {
				t.Errorf("%s: the first %d bytes can be changed", k.file, i)
			}
			broken := bytes.Clone(original)
			broken[i] ^= 0xff
			changeKeystore(t, r, broken)
		}
	}
}

// TestContextEnds: with no time left the state is unknown, and no store is half written.
func TestContextEnds(t *testing.T) {
	image := string(pki.NewCA("image").Cert)
	root := tree(t, map[string]string{debianBundle: image})
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	report := Add(ctx, root, pki.NewCA("proxy").Cert, Options{})
	wantState(t, report, Unknown)
	if report.Error == "" {
		t.Error("got no error")
	}
	if got := read(t, root, debianBundle); !strings.HasPrefix(got, image) {
		t.Errorf("the bundle has become\n%s", got)
	}
}
