package truststore

import (
	"bytes"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-cni/sluice/integration/pki"
)

const (
	debianAnchor = "/usr/local/share/ca-certificates"
	rhelBundle   = "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem"
	rhelAnchor   = "/etc/pki/ca-trust/source/anchors"
	certs        = "/etc/ssl/certs"
)

func TestLayouts(t *testing.T) {
	image := string(pki.NewCA("image").Cert)
	for _, test := range []struct {
		name  string
		files map[string]string
		want  map[string]Action
		state State
	}{
		{
			name: "Debian",
			files: map[string]string{
				debianBundle: image, certs + "/11112222.0": "-> image.pem", certs + "/image.pem": image,
				"/usr/bin/dpkg": "", "/usr/lib/ssl/cert.pem": "-> " + debianBundle, debianAnchor + "/": "",
			},
			want:  map[string]Action{debianBundle: Appended, certs: Appended, debianAnchor: Appended},
			state: Trusted,
		},
		{
			name:  "Debian without ca-certificates",
			files: map[string]string{"/usr/bin/dpkg": "", "/usr/lib/ssl/cert.pem": "-> " + debianBundle},
			want:  map[string]Action{debianAnchor: Appended},
			state: Unknown,
		},
		{
			name: "Alpine",
			files: map[string]string{
				debianBundle: image, "/etc/ssl/cert.pem": "-> certs/ca-certificates.crt", "/sbin/apk": "",
			},
			want:  map[string]Action{debianBundle: Appended, debianAnchor: Appended},
			state: Trusted,
		},
		{
			name: "RHEL",
			files: map[string]string{
				rhelBundle: image, "/etc/pki/tls/certs/ca-bundle.crt": "-> " + rhelBundle, rhelAnchor + "/": "",
				"/etc/pki/tls/cert.pem": "-> certs/ca-bundle.crt", "/etc/ssl/certs": "-> ../pki/tls/certs",
			},
			want:  map[string]Action{"/etc/pki/tls/certs/ca-bundle.crt": Appended, rhelAnchor: Appended},
			state: Trusted,
		},
		{
			name: "SUSE",
			files: map[string]string{
				"/var/lib/ca-certificates/ca-bundle.pem":      image,
				"/etc/ssl/ca-bundle.pem":                      "-> ../../var/lib/ca-certificates/ca-bundle.pem",
				"/var/lib/ca-certificates/pem/11112222.0":     image,
				"/etc/ssl/certs":                              "-> ../../var/lib/ca-certificates/pem",
				"/etc/pki/trust/anchors/":                     "",
				"/var/lib/ca-certificates/openssl/33334444.0": image,
			},
			want: map[string]Action{
				"/etc/ssl/ca-bundle.pem": Appended, certs: Appended, "/var/lib/ca-certificates/pem": Present,
				"/var/lib/ca-certificates/openssl": Appended, "/etc/pki/trust/anchors": Appended,
			},
			state: Trusted,
		},
		{
			name:  "distroless",
			files: map[string]string{debianBundle: image},
			want:  map[string]Action{debianBundle: Appended},
			state: Trusted,
		},
		{
			name:  "busybox",
			files: map[string]string{"/bin/busybox": "", "/etc/": ""},
			want:  map[string]Action{},
			state: Unknown,
		},
		{
			name: "virtual environments",
			files: map[string]string{
				"/opt/venv/lib/python3.12/site-packages/certifi/cacert.pem":                                 image,
				"/usr/lib/python3/dist-packages/pip/_vendor/certifi/cacert.pem":                             image,
				"/home/u/app/.venv/lib/python3.12/site-packages/certifi/cacert.pem":                         image,
				"/root/.pyenv/versions/3.12.1/lib/python3.12/site-packages/certifi/cacert.pem":              image,
				"/home/u/app/node_modules/x/site-packages/certifi/cacert.pem":                               image,
				"/usr/local/aws-cli/v2/2.1.0/dist/awscli/botocore/cacert.pem":                               image,
				"/root/.local/share/uv/python/cpython-3.12/lib/python3.12/site-packages/certifi/cacert.pem": image,
				"/a/b/c/d/e/f/g/h/i/j/site-packages/certifi/cacert.pem":                                     image,
			},
			want: map[string]Action{
				"/opt/venv/lib/python3.12/site-packages/certifi/cacert.pem":                                 Appended,
				"/usr/lib/python3/dist-packages/pip/_vendor/certifi/cacert.pem":                             Appended,
				"/home/u/app/.venv/lib/python3.12/site-packages/certifi/cacert.pem":                         Appended,
				"/root/.pyenv/versions/3.12.1/lib/python3.12/site-packages/certifi/cacert.pem":              Appended,
				"/usr/local/aws-cli/v2/2.1.0/dist/awscli/botocore/cacert.pem":                               Appended,
				"/root/.local/share/uv/python/cpython-3.12/lib/python3.12/site-packages/certifi/cacert.pem": Appended,
			},
			state: Trusted,
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			root := tree(t, test.files)
			ca := pki.NewCA("proxy").Cert
			report := add(t, root, ca)
			wantState(t, report, test.state)
			if len(report.Stores) != len(test.want) {
				t.Errorf("got %d stores, want %d: %+v", len(report.Stores), len(test.want), report.Stores)
			}
			for path, action := range test.want {
				wantAction(t, report, path, action)
			}
			for _, s := range report.Stores {
				if s.Kind == Bundle || s.Kind == Certifi {
					wantCertificates(t, read(t, root, s.Path), []byte(image), ca)
				}
			}
			for _, s := range add(t, root, ca).Stores {
				if s.Action != Present {
					t.Errorf("%s, a second time: got %s (%s), want present", s.Path, s.Action, s.Error)
				}
			}
		})
	}
}

func TestRotation(t *testing.T) {
	image, first, second := pki.NewCA("image").Cert, pki.NewCA("root 1").Cert, pki.NewCA("root 2").Cert
	root := tree(t, map[string]string{
		debianBundle: string(image), certs + "/11112222.0": string(image), debianAnchor + "/": "",
	})
	add(t, root, first)
	add(t, root, append(append([]byte{}, first...), second...))
	wantCertificates(t, read(t, root, debianBundle), image, first, second)
	wantState(t, add(t, root, second), Trusted)
	wantCertificates(t, read(t, root, debianBundle), image, second)
	for _, folder := range []string{certs, debianAnchor} {
		if names := oursIn(t, root, folder); len(names) != 1 {
			t.Errorf("files of ours in %s: got %v, want one", folder, names)
		}
	}
}

// TestRotationOfAnUnmarkedCopy: update-ca-trust copies an anchor into its bundles without the marker.
func TestRotationOfAnUnmarkedCopy(t *testing.T) {
	image, first, second := pki.NewCA("image").Cert, pki.NewCA("root 1").Cert, pki.NewCA("root 2").Cert
	root := tree(t, map[string]string{rhelBundle: string(image), rhelAnchor + "/": ""})
	add(t, root, first)
	extracted := append(bytes.Clone(image), first...)
	if err := os.WriteFile(filepath.Join(root, rhelBundle), extracted, 0o644); err != nil {
		t.Fatal(err)
	}
	add(t, root, second)
	wantCertificates(t, read(t, root, rhelBundle), image, second)
}

// TestRotationOfOneSubject: certificates of one subject have one hash, and OpenSSL stops at the first missing number.
func TestRotationOfOneSubject(t *testing.T) {
	name := pkix.Name{CommonName: "mitmproxy", Organization: []string{"mitmproxy"}}
	first, second, third := pki.NewCAOf(name).Cert, pki.NewCAOf(name).Cert, pki.NewCAOf(name).Cert
	root := tree(t, map[string]string{certs + "/11112222.0": ""})
	parsed, err := parseCA(first)
	if err != nil {
		t.Fatal(err)
	}
	add(t, root, append(append([]byte{}, first...), second...))
	add(t, root, append(append([]byte{}, second...), third...))
	var got strings.Builder
	for _, number := range []string{".0", ".1"} {
		got.WriteString(read(t, root, certs+"/"+parsed[0].hash+number))
	}
	wantCertificates(t, got.String(), second, third)
	if _, err := os.Lstat(filepath.Join(root, certs, parsed[0].hash+".2")); !os.IsNotExist(err) {
		t.Errorf("a third link: got %v, want none", err)
	}
}

func TestOwnerModeAttributesAndLinksStay(t *testing.T) {
	root := tree(t, map[string]string{
		"/usr/share/store/bundle.pem": string(pki.NewCA("image").Cert),
		debianBundle:                  "-> ../../../usr/share/store/bundle.pem",
	})
	file := filepath.Join(root, "/usr/share/store/bundle.pem")
	if err := os.Chown(file, 1234, 4321); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(file, 0o640); err != nil {
		t.Fatal(err)
	}
	if err := unix.Setxattr(file, "user.note", []byte("kept"), 0); err != nil {
		t.Fatal(err)
	}
	wantAction(t, add(t, root, pki.NewCA("proxy").Cert), debianBundle, Appended)
	target, err := os.Readlink(filepath.Join(root, debianBundle))
	if err != nil || !strings.HasSuffix(target, "bundle.pem") {
		t.Errorf("the link: got %q, %v", target, err)
	}
	var info unix.Stat_t
	if err := unix.Stat(file, &info); err != nil {
		t.Fatal(err)
	}
	if info.Uid != 1234 || info.Gid != 4321 || info.Mode&0o7777 != 0o640 {
		t.Errorf("got owner %d:%d, mode %o", info.Uid, info.Gid, info.Mode)
	}
	value := make([]byte, 16)
	n, err := unix.Getxattr(file, "user.note", value)
	if err != nil || string(value[:n]) != "kept" {
		t.Errorf("the attribute: got %q, %v", value[:max(n, 0)], err)
	}
}

func TestReadOnlyRoot(t *testing.T) {
	image, first, second := pki.NewCA("image").Cert, pki.NewCA("root 1").Cert, pki.NewCA("root 2").Cert
	root := tree(t, map[string]string{
		debianBundle: string(image), certs + "/11112222.0": "-> image.pem", certs + "/image.pem": string(image),
		certs + "/java/other": "x", rhelBundle: string(image),
	})
	readOnly(t, root)
	report := add(t, root, first)
	wantState(t, report, Trusted)
	wantAction(t, report, rhelBundle, Bound)
	wantAction(t, report, debianBundle, Bound)
	wantAction(t, report, certs, Bound)
	for _, path := range []string{rhelBundle, debianBundle} {
		wantCertificates(t, read(t, root, path), image, first)
	}
	if got := read(t, root, certs+"/java/other"); got != "x" {
		t.Errorf("a file below the directory: got %q", got)
	}
	wantCertificates(t, read(t, root, certs+"/11112222.0"), image)
	for _, s := range add(t, root, first).Stores {
		if s.Action != Present {
			t.Errorf("%s, a second time: got %s (%s), want present", s.Path, s.Action, s.Error)
		}
	}
	wantState(t, add(t, root, second), Trusted)
	wantCertificates(t, read(t, root, rhelBundle), image, second)
	if err := os.WriteFile(filepath.Join(root, rhelBundle), nil, 0o644); err == nil {
		t.Error("the mounted copy can be written")
	}
	t.Cleanup(func() { unmountAll(t, root, rhelBundle, debianBundle, certs) })
}

// unmountAll takes away the mounts that Add has made.
func unmountAll(t testing.TB, root string, paths ...string) {
	t.Helper()
	for _, path := range paths {
		var err error
		for err == nil {
			err = unix.Unmount(filepath.Join(root, path), unix.MNT_DETACH)
		}
	}
}

func TestVolumeIsNotWritten(t *testing.T) {
	image, ca := pki.NewCA("image").Cert, pki.NewCA("proxy").Cert
	volume := tree(t, map[string]string{"tls-ca-bundle.pem": string(image)})
	packages := tree(t, map[string]string{"site-packages/certifi/cacert.pem": string(image)})
	root := tree(t, map[string]string{
		"/etc/pki/ca-trust/extracted/pem/": "", "/data/": "", debianAnchor + "/": "", debianBundle: string(image),
	})
	mount(t, volume, filepath.Join(root, "/etc/pki/ca-trust/extracted/pem"), "", unix.MS_BIND, "")
	mount(t, packages, filepath.Join(root, "/data"), "", unix.MS_BIND, "")
	mount(t, t.TempDir(), filepath.Join(root, debianAnchor), "", unix.MS_BIND, "")
	report := add(t, root, ca)
	wantAction(t, report, rhelBundle, Bound)
	wantAction(t, report, debianBundle, Appended)
	wantAction(t, report, debianAnchor, Failed)
	wantState(t, report, Trusted)
	wantCertificates(t, read(t, root, rhelBundle), image, ca)
	unmountAll(t, root, rhelBundle)
	wantCertificates(t, read(t, volume, "tls-ca-bundle.pem"), image)
	wantCertificates(t, read(t, packages, "site-packages/certifi/cacert.pem"), image)
	if names := oursIn(t, root, debianAnchor); len(names) != 0 {
		t.Errorf("files in a volume: %v", names)
	}
}

// TestChangingVolume: kubelet exchanges the files of a volume, and the next run adds the CA again.
func TestChangingVolume(t *testing.T) {
	image, company, ca := pki.NewCA("image").Cert, pki.NewCA("company").Cert, pki.NewCA("proxy").Cert
	volume := tree(t, map[string]string{
		"..1/ca-certificates.crt": string(image), "..2/ca-certificates.crt": string(image) + string(company),
		"..data": "-> ..1", "ca-certificates.crt": "-> ..data/ca-certificates.crt",
	})
	root := tree(t, map[string]string{"/etc/ssl/certs/": "", rhelBundle: string(image)})
	mount(t, volume, filepath.Join(root, "/etc/ssl/certs"), "", unix.MS_BIND, "")
	for i, want := range [][][]byte{{image, ca}, {image, company, ca}} {
		for _, action := range []Action{Bound, Present} {
			report := add(t, root, ca)
			wantAction(t, report, debianBundle, action)
			if !report.store(t, debianBundle).Changing || report.store(t, rhelBundle).Changing {
				t.Errorf("got %+v, want the bundle in the volume alone to change", report)
			}
		}
		wantCertificates(t, read(t, root, debianBundle), want...)
		if i == 0 {
			if err := errors.Join(os.Symlink("..2", filepath.Join(volume, "..next")),
				os.Rename(filepath.Join(volume, "..next"), filepath.Join(volume, "..data"))); err != nil {
				t.Fatal(err)
			}
			wantCertificates(t, read(t, root, debianBundle), image, company)
		}
	}
	unmountAll(t, root, "/etc/ssl/certs/..1/ca-certificates.crt")
	unmountAll(t, root, "/etc/ssl/certs/..2/ca-certificates.crt")
}

// TestNamed: stores that the container's own variables name.
func TestNamed(t *testing.T) {
	image, ca := pki.NewCA("image").Cert, pki.NewCA("proxy").Cert
	for _, test := range []struct {
		name, path string
		action     Action
		state      State
	}{
		{"a bundle", "/opt/ca.pem", Appended, Trusted},
		{"an empty bundle", "/opt/empty.pem", Appended, Trusted},
		{"a directory", "/opt/certs", Appended, Trusted},
		{"a directory without hashed names", "/opt", Failed, FilesOnly},
		{"nothing", "/opt/missing.pem", Failed, FilesOnly},
		{"a relative path", "opt/ca.pem", Failed, FilesOnly},
		{"a device", "/dev/null", Failed, FilesOnly},
	} {
		t.Run(test.name, func(t *testing.T) {
			root := tree(t, map[string]string{
				debianBundle: string(image), "/opt/ca.pem": string(image), "/opt/empty.pem": "",
				"/opt/certs/11112222.0": string(image), "/dev/": "",
			})
			if err := unix.Mknod(filepath.Join(root, "/dev/null"), unix.S_IFCHR, int(unix.Mkdev(1, 3))); err != nil {
				t.Fatal(err)
			}
			report := addWith(t, root, ca, Options{Named: []string{test.path}})
			wantAction(t, report, test.path, test.action)
			wantState(t, report, test.state)
		})
	}
	root := tree(t, map[string]string{debianBundle: string(image)})
	report := addWith(t, root, ca, Options{Named: []string{debianBundle}})
	wantState(t, report, Trusted)
	if len(report.Stores) != 1 {
		t.Errorf("a store that is found and named: got %+v, want it once", report.Stores)
	}
}

// withFallback mounts a folder with a fallback, as the runtime does, and returns the options for it.
func withFallback(t *testing.T, root, contents string) Options {
	t.Helper()
	const folder, name = "/.sluice-ca", "/.sluice-ca/roots/bundle.crt"
	node := tree(t, map[string]string{"/roots/bundle.crt": contents})
	mount(t, node, filepath.Join(root, folder), "", unix.MS_BIND, "")
	t.Cleanup(func() { unmountAll(t, root, "/.sluice-ca/roots") })
	return Options{Fallback: name}
}

func TestFallback(t *testing.T) {
	image, ca, company := pki.NewCA("image").Cert, pki.NewCA("proxy").Cert, pki.NewCA("company").Cert
	roots := string(image) + string(ca)
	folder := map[string]string{"/.sluice-ca/": ""}
	withBundle := map[string]string{"/.sluice-ca/": "", debianBundle: string(image)}

	t.Run("the image has a bundle", func(t *testing.T) {
		root := tree(t, withBundle)
		options := withFallback(t, root, roots)
		report := addWith(t, root, ca, options)
		wantState(t, report, Trusted)
		wantAction(t, report, options.Fallback, Linked)
		wantCertificates(t, read(t, root, options.Fallback), image, ca)

		// As update-ca-certificates does, with a CA of the user's own.
		own := filepath.Join(root, debianBundle)
		more := string(image) + string(ca) + string(company)
		if err := errors.Join(os.WriteFile(own+".new", []byte(more), 0o644), os.Rename(own+".new", own)); err != nil {
			t.Fatal(err)
		}
		wantCertificates(t, read(t, root, options.Fallback), image, ca, company)
		wantAction(t, addWith(t, root, ca, options), options.Fallback, Present)
		if err := os.Remove(filepath.Join(root, "/.sluice-ca/roots/bundle.crt")); !errors.Is(err, unix.EROFS) {
			t.Errorf("removing the link: got %v, want EROFS", err)
		}
	})
	t.Run("the root is read-only", func(t *testing.T) {
		root := tree(t, withBundle)
		readOnly(t, root)
		options := withFallback(t, root, roots)
		t.Cleanup(func() { unmountAll(t, root, debianBundle) })
		report := addWith(t, root, ca, options)
		wantAction(t, report, debianBundle, Bound)
		wantAction(t, report, options.Fallback, Linked)
		wantCertificates(t, read(t, root, options.Fallback), image, ca)
	})
	t.Run("the bundle has gone since", func(t *testing.T) {
		root := tree(t, withBundle)
		options := withFallback(t, root, roots)
		addWith(t, root, ca, options)
		if err := os.Remove(filepath.Join(root, debianBundle)); err != nil {
			t.Fatal(err)
		}
		report := addWith(t, root, ca, options)
		wantState(t, report, Trusted)
		wantAction(t, report, options.Fallback, Present)
		wantCertificates(t, read(t, root, options.Fallback), image, ca)
	})
	t.Run("the image has none", func(t *testing.T) {
		root := tree(t, folder)
		options := withFallback(t, root, roots)
		for _, action := range []Action{Linked, Present} {
			report := addWith(t, root, ca, options)
			wantState(t, report, Trusted)
			wantAction(t, report, options.Fallback, Present)
			wantAction(t, report, debianBundle, action)
		}
		if target, err := os.Readlink(filepath.Join(root, debianBundle)); err != nil || target != options.Fallback {
			t.Errorf("the bundle: got a link to %q, %v", target, err)
		}
	})
	t.Run("the image has none and the root is read-only", func(t *testing.T) {
		root := tree(t, folder)
		readOnly(t, root)
		report := addWith(t, root, ca, withFallback(t, root, roots))
		wantState(t, report, FilesOnly)
		wantAction(t, report, debianBundle, Failed)
	})
	t.Run("the image has none, and the runtime's umask is 077", func(t *testing.T) {
		root := tree(t, folder)
		options := withFallback(t, root, roots)
		old := unix.Umask(0o077)
		report := addWith(t, root, ca, options)
		unix.Umask(old)
		wantAction(t, report, debianBundle, Linked)
		if info, err := os.Stat(filepath.Join(root, certs)); err != nil || info.Mode().Perm() != 0o755 {
			t.Errorf("the folder: got %v, %v, want the mode 755", info, err)
		}
	})
	t.Run("the image has none but RPM", func(t *testing.T) {
		root := tree(t, map[string]string{"/.sluice-ca/": "", "/var/lib/rpm/": ""})
		options := withFallback(t, root, roots)
		report := addWith(t, root, ca, options)
		wantState(t, report, Trusted)
		wantAction(t, report, fedoraBundle, Linked)
		wantCertificates(t, read(t, root, fedoraBundle), image, ca)
		if _, err := os.Lstat(filepath.Join(root, certs)); !os.IsNotExist(err) {
			t.Errorf("%s, which the package ca-certificates makes a link: got %v", certs, err)
		}
	})
	t.Run("the image has none, and a volume is in its place", func(t *testing.T) {
		root := tree(t, map[string]string{"/.sluice-ca/": "", "/etc/ssl/": ""})
		volume := tree(t, nil)
		mount(t, volume, filepath.Join(root, "/etc/ssl"), "", unix.MS_BIND, "")
		report := addWith(t, root, ca, withFallback(t, root, roots))
		wantState(t, report, FilesOnly)
		wantAction(t, report, debianBundle, Failed)
		if entries, err := os.ReadDir(volume); err != nil || len(entries) > 0 {
			t.Errorf("in the volume: %v, %v", entries, err)
		}
	})
	t.Run("the image has none, and links lead out", func(t *testing.T) {
		outside := tree(t, nil)
		root := tree(t, map[string]string{"/.sluice-ca/": "", "/etc/ssl": "-> " + outside})
		report := addWith(t, root, ca, withFallback(t, root, roots))
		wantState(t, report, FilesOnly)
		wantAction(t, report, debianBundle, Failed)
		if entries, err := os.ReadDir(outside); err != nil || len(entries) > 0 {
			t.Errorf("outside of the root: %v, %v", entries, err)
		}
	})
	t.Run("the image has none, and the mount is missing later", func(t *testing.T) {
		root := tree(t, folder)
		options := withFallback(t, root, roots)
		addWith(t, root, ca, options)
		mount(t, "tmpfs", filepath.Join(root, "/.sluice-ca"), "tmpfs", 0, "") // with nothing in it
		wantState(t, add(t, root, ca), Unknown)
		report := addWith(t, root, ca, withFallback(t, root, roots))
		wantState(t, report, Trusted)
		wantAction(t, report, debianBundle, Present)
	})
	t.Run("the image has none and the fallback lacks the CA", func(t *testing.T) {
		root := tree(t, folder)
		options := withFallback(t, root, string(image))
		report := addWith(t, root, ca, options)
		wantState(t, report, Unknown)
		wantAction(t, report, options.Fallback, Failed)
	})
	t.Run("a store fails", func(t *testing.T) {
		root := tree(t, map[string]string{"/.sluice-ca/": "", debianBundle: "-----BEGIN CERTIFICATE-----\n"})
		options := withFallback(t, root, roots)
		report := addWith(t, root, ca, options)
		wantState(t, report, FilesOnly)
		wantAction(t, report, debianBundle, Failed)
		wantCertificates(t, read(t, root, options.Fallback), image, ca)
	})
	t.Run("no mount", func(t *testing.T) {
		root := tree(t, map[string]string{debianBundle: string(image), "/.sluice-ca/roots/bundle.crt": roots})
		report := addWith(t, root, ca, Options{Fallback: "/.sluice-ca/roots/bundle.crt"})
		wantState(t, report, Trusted)
		wantAction(t, report, "/.sluice-ca/roots/bundle.crt", Failed)
		wantCertificates(t, read(t, root, "/.sluice-ca/roots/bundle.crt"), image, ca)
	})
}

// TestEnter: a store on a read-only root of another mount namespace is bound there.
func TestEnter(t *testing.T) {
	image, first, second := pki.NewCA("image").Cert, pki.NewCA("root 1").Cert, pki.NewCA("root 2").Cert
	root := tree(t, map[string]string{debianBundle: string(image)})
	readOnly(t, root)
	cmd := exec.Command("/bin/sleep", "1000")
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait() // killed
	})
	process := fmt.Sprintf("/proc/%d", cmd.Process.Pid)
	namespace, err := os.Open(process + "/ns/mnt")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = namespace.Close() }) // only read
	enter := Options{Enter: func() error {
		return errors.Join(unix.Unshare(unix.CLONE_FS), unix.Setns(int(namespace.Fd()), unix.CLONE_NEWNS))
	}}
	inside := process + "/root" + root
	for _, ca := range [][]byte{first, second} { // the second run takes the mount of the first away
		report := addWith(t, inside, ca, enter)
		wantAction(t, report, debianBundle, Bound)
		wantCertificates(t, read(t, inside, debianBundle), image, ca)
	}
	wantCertificates(t, read(t, root, debianBundle), image)
	mounts, err := os.ReadFile(process + "/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(string(mounts), filepath.Join(root, debianBundle)); n != 1 {
		t.Errorf("got %d mounts over the bundle, want 1", n)
	}
	want, err := Fingerprints(second)
	if err != nil {
		t.Fatal(err)
	}
	if got := addWith(t, inside, second, enter).CA; !slices.Equal(got, want) {
		t.Errorf("got the fingerprints %v, want %v", got, want)
	}
}

// TestPresentInTheImage: a CA that the image has is neither added nor, later, removed.
func TestPresentInTheImage(t *testing.T) {
	ca := pki.NewCA("proxy").Cert
	root := tree(t, map[string]string{debianBundle: string(ca)})
	wantAction(t, add(t, root, ca), debianBundle, Present)
	other := pki.NewCA("other").Cert
	add(t, root, other)
	wantCertificates(t, read(t, root, debianBundle), ca, other)
}

func TestRefusedCA(t *testing.T) {
	root := tree(t, map[string]string{debianBundle: ""})
	for name, ca := range map[string]string{
		"nothing":  "",
		"no PEM":   "hello",
		"a key":    "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n",
		"no DER":   "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
		"too many": strings.Repeat("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", maxCAs+1),
	} {
		t.Run(name, func(t *testing.T) {
			report := add(t, root, []byte(ca))
			wantState(t, report, Unknown)
			if !strings.HasPrefix(report.Error, "reading the CA: ") || read(t, root, debianBundle) != "" {
				t.Errorf("got %+v", report)
			}
		})
	}
}

func oursIn(t testing.TB, root, folder string) []string {
	t.Helper()
	entries, err := os.ReadDir(filepath.Join(root, folder))
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		if strings.Contains(e.Name(), namePrefix) {
			names = append(names, e.Name())
		}
	}
	return names
}
