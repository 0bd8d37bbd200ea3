package truststore

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-cni/sluice/integration/clients"
	"github.com/sluice-cni/sluice/integration/pki"
	"github.com/sluice-cni/sluice/integration/testbed"
	"github.com/sluice-cni/sluice/plugin/truststore"
)

// TestHookNeverFails: a container starts whatever is wrong with the hook's input, and the log says what it is.
func TestHookNeverFails(t *testing.T) {
	ca := newAuthority(t)
	dir := t.TempDir()
	caFile := filepath.Join(dir, "ca.pem")
	if err := os.WriteFile(caFile, ca.pem, 0o600); err != nil {
		t.Fatal(err)
	}
	noRoot, badConfig := t.TempDir(), t.TempDir()
	for folder, config := range map[string]string{noRoot: `{"root":{"path":"missing"}}`, badConfig: `{`} {
		if err := os.WriteFile(filepath.Join(folder, "config.json"), []byte(config), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, test := range []struct {
		name, state, log string
		args             []string
	}{
		{"no arguments", "", "--ca is missing", nil},
		{"an unknown flag", "", "flag provided but not defined", []string{"--what"}},
		{"one argument too many", "", "unexpected argument", []string{"--ca", caFile, "more"}},
		{"no state", "", "reading the state", []string{"--ca", caFile}},
		{"a state that is no JSON", "hello", "reading the state", []string{"--ca", caFile}},
		{"a relative bundle", `{"bundle":"x"}`, "is not an absolute path", []string{"--ca", caFile}},
		{"no configuration", fmt.Sprintf(`{"bundle":%q}`, dir), "reading the configuration", []string{"--ca", caFile}},
		{"a broken configuration", fmt.Sprintf(`{"bundle":%q}`, badConfig), "parsing the configuration",
			[]string{"--ca", caFile}},
		{"no root", fmt.Sprintf(`{"bundle":%q}`, noRoot), "opening the root", []string{"--ca", caFile}},
		{"no CA", fmt.Sprintf(`{"bundle":%q}`, noRoot), "reading the CA", []string{"--ca", dir + "/missing"}},
		{"a report that cannot be written", "{}", "writing the report",
			[]string{"--ca", caFile, "--report", dir + "/missing/report"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			sluice := filepath.Join(testbed.Binaries(t), "sluice")
			cmd := exec.Command(sluice, append([]string{"ca-hook"}, test.args...)...)
			cmd.Stdin = strings.NewReader(test.state)
			out, err := cmd.CombinedOutput()
			if err != nil || !strings.Contains(string(out), test.log) {
				t.Errorf("got %v and the log %q, want %q in it", err, out, test.log)
			}
		})
	}
}

// TestHookGivesUp: a runtime that never writes the state holds the container up for a second only.
func TestHookGivesUp(t *testing.T) {
	ca := filepath.Join(t.TempDir(), "ca.pem")
	if err := os.WriteFile(ca, newAuthority(t).pem, 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(filepath.Join(testbed.Binaries(t), "sluice"), "ca-hook", "--ca", ca)
	reader, writer, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = errors.Join(reader.Close(), writer.Close()) }) // until then the standard input stays open
	cmd.Stdin = reader
	if out, err := cmd.CombinedOutput(); err != nil || !strings.Contains(string(out), "deadline exceeded") {
		t.Errorf("got %v and the log %q", err, out)
	}
}

// TestFallbackBundle: the file that environment variables name is the image's own bundle, also after
// update-ca-certificates has added a CA of the user's own.
func TestFallbackBundle(t *testing.T) {
	ca := newAuthority(t)
	c := newContainer(t, "/")
	const folder, fallback = "/.sluice-ca/roots", "/.sluice-ca/roots/bundle.crt"
	c.write(fallback, string(ca.pem))
	mount(t, filepath.Join(c.root, folder), filepath.Join(c.root, folder), "", unix.MS_BIND, "")
	report := c.hook(ca.pem, "--bundle", fallback)
	t.Cleanup(func() { testbed.Run(t, "umount", filepath.Join(c.root, folder)) })
	if report.State != truststore.Trusted || len(report.CA) != 1 {
		t.Errorf("got %+v", report)
	}
	company := pki.NewCA("The company's CA").Cert
	c.write("/usr/local/share/ca-certificates/company.crt", string(company))
	if out, err := c.command(nil, "update-ca-certificates").CombinedOutput(); err != nil {
		t.Fatalf("update-ca-certificates: %v\n%s", err, out)
	}
	got, err := c.command(nil, "cat", fallback).Output()
	c.must(err)
	if !bytes.Contains(got, company) || !bytes.Contains(got, ca.pem) || bytes.Count(got, []byte("BEGIN")) < 50 {
		t.Errorf("the fallback lacks the user's CA, the proxy's or the image's: %d bytes", len(got))
	}
}

// TestLinkedBundle: update-ca-certificates works in an image without a bundle, to which the hook has given a link, and
// puts a bundle with the CA in its place.
func TestLinkedBundle(t *testing.T) {
	ca := newAuthority(t)
	c := newContainer(t, "/")
	const folder, fallback = "/.sluice-ca/roots", "/.sluice-ca/roots/bundle.crt"
	const bundle = "/etc/ssl/certs/ca-certificates.crt"
	c.must(os.RemoveAll(filepath.Join(c.root, "/etc/ssl/certs")))
	c.must(os.RemoveAll(filepath.Join(c.root, "/etc/pki")))
	c.write(fallback, string(ca.pem))
	mount(t, filepath.Join(c.root, folder), filepath.Join(c.root, folder), "", unix.MS_BIND, "")
	c.hook(ca.pem, "--bundle", fallback)
	if target, err := os.Readlink(filepath.Join(c.root, bundle)); err != nil || target != fallback {
		t.Fatalf("the bundle: got a link to %q, %v", target, err)
	}
	if out, err := c.command(nil, "update-ca-certificates").CombinedOutput(); err != nil {
		t.Fatalf("update-ca-certificates: %v\n%s", err, out)
	}
	info, err := os.Lstat(filepath.Join(c.root, bundle))
	c.must(err)
	got, err := os.ReadFile(filepath.Join(c.root, bundle))
	c.must(err)
	if !info.Mode().IsRegular() || !bytes.Contains(got, ca.pem) || bytes.Count(got, []byte("BEGIN")) < 50 {
		t.Errorf("got %s with %d bytes, want a bundle of its own", info.Mode(), len(got))
	}
}

// TestOtherLayouts: Go finds the CA in the bundles of other distributions, and openssl in their directories.
func TestOtherLayouts(t *testing.T) {
	ca := newAuthority(t)
	for name, place := range map[string]struct{ bundle, directory string }{
		"like Alpine": {bundle: "/etc/ssl/cert.pem", directory: "/etc/ssl/certs"},
		"like RHEL": {
			bundle:    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
			directory: "/etc/pki/ca-trust/extracted/pem/directory-hash",
		},
		"like SUSE": {bundle: "/var/lib/ca-certificates/ca-bundle.pem", directory: "/var/lib/ca-certificates/pem"},
	} {
		t.Run(name, func(t *testing.T) {
			c := newContainer(t, "/")
			c.addGo()
			bundle, err := os.ReadFile(filepath.Join(c.root, "/etc/ssl/certs/ca-certificates.crt"))
			c.must(err)
			c.must(os.RemoveAll(filepath.Join(c.root, "/etc/ssl/certs")))
			c.write(place.bundle, string(bundle))
			c.write(place.directory+"/11112222.0", string(bundle))
			if strings.HasPrefix(place.bundle, "/var") { // SUSE links to it
				c.must(os.Symlink("../../"+place.bundle, filepath.Join(c.root, "/etc/ssl/ca-bundle.pem")))
			}
			present := []clients.Client{
				clients.Go,
				clients.OpenSSL("openssl, a bundle", "-no-CApath", "-no-CAstore", "-CAfile", place.bundle),
				clients.OpenSSL("openssl, a directory", "-no-CAfile", "-no-CAstore", "-CApath", place.directory),
			}
			for _, client := range present {
				if out, ok := client.Try(c.exec, ca.url); ok {
					t.Errorf("%s trusts the CA before the hook: %s", client.Name, out)
				}
			}
			if report := c.hook(ca.pem); report.State != truststore.Trusted {
				t.Errorf("got %+v", report)
			}
			for _, client := range present {
				if out, ok := client.Try(c.exec, ca.url); !ok {
					t.Errorf("%s does not trust the CA: %s", client.Name, out)
				}
			}
		})
	}
}
