package truststore

import (
	"bytes"
	"context"
	"crypto/sha1"
	"encoding/pem"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sluice-cni/sluice/integration/pki"
)

const cacerts = "/etc/ssl/certs/java/cacerts"

// keystores are made by keytool of Java 17. Each has the certificate image.pem under the alias "image", and some a
// private key under "key".
var keystores = []struct {
	file   string
	hasKey bool
	failed string // the reason if the keystore cannot be changed
}{
	{file: "trusted.jks", hasKey: true},
	{file: "trusted.jceks"},
	{file: "encrypted.p12", hasKey: true},
	{file: "legacy.p12"}, // MAC with SHA-1 and 100,000 iterations
	{file: "plain.p12"},  // without password, as OpenJDK's cacerts
	{file: "otherpass.jks", failed: "its password is none of the usual ones"},
	{file: "otherpass.p12", failed: "its password is none of the usual ones"},
}

func TestKeystores(t *testing.T) {
	for _, test := range keystores {
		t.Run(test.file, func(t *testing.T) {
			t.Parallel()
			image := string(testFile(t, "image.pem"))
			original := string(testFile(t, test.file))
			root := tree(t, map[string]string{cacerts: original})
			first, second := pki.NewCA("root 1").Cert, pki.NewCA("root 2").Cert
			report := add(t, root, first)
			if test.failed != "" {
				wantAction(t, report, cacerts, Failed)
				if got := report.store(t, cacerts).Error; !strings.Contains(got, test.failed) {
					t.Errorf("got the error %q, want %q", got, test.failed)
				}
				if read(t, root, cacerts) != original {
					t.Error("the keystore has changed")
				}
				return
			}
			wantAction(t, report, cacerts, Appended)
			wantAction(t, add(t, root, first), cacerts, Present)
			wantAction(t, add(t, root, append(bytes.Clone(first), second...)), cacerts, Appended)
			wantKeystore(t, root, test.hasKey, image, string(first), string(second))
			wantAction(t, add(t, root, second), cacerts, Appended)
			wantKeystore(t, root, test.hasKey, image, string(second))
		})
	}
}

// TestKeystoreWithTheCA: a certificate that is there under any alias is not added.
func TestKeystoreWithTheCA(t *testing.T) {
	for _, file := range []string{"trusted.jks", "trusted.jceks", "plain.p12"} {
		root := tree(t, map[string]string{cacerts: string(testFile(t, file))})
		wantAction(t, add(t, root, testFile(t, "image.pem")), cacerts, Present)
	}
}

func testFile(t testing.TB, name string) []byte {
	t.Helper()
	data, err := os.ReadFile(filepath.Join("testdata", name))
	if err != nil {
		t.Fatal(err)
	}
	return data
}

// wantKeystore checks the trusted certificates of a keystore. keytool reads it where the machine has a Java; otherwise
// openssl reads PKCS12, and this package JKS.
func wantKeystore(t *testing.T, root string, hasKey bool, want ...string) {
	t.Helper()
	file := filepath.Join(root, cacerts)
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	keytool, err := exec.LookPath("keytool")
	switch {
	case err == nil:
		wantInKeytool(t, keytool, file, hasKey, want)
	case data[0] == derSequence:
		wantInOpenSSL(t, file, want)
	default:
		wantInJKS(t, data, want)
	}
}

func wantInKeytool(t *testing.T, keytool, file string, hasKey bool, want []string) {
	t.Helper()
	out, err := exec.Command(keytool, "-list", "-rfc", "-keystore", file, "-storepass", "changeit").CombinedOutput()
	if err != nil {
		t.Fatalf("keytool: %v\n%s", err, out)
	}
	if got := strings.Contains(string(out), "PrivateKeyEntry"); got != hasKey {
		t.Errorf("a private key: got %v, want %v", got, hasKey)
	}
	if got := strings.Count(string(out), "trustedCertEntry"); got != len(want) {
		t.Errorf("got %d trusted certificates, want %d:\n%s", got, len(want), out)
	}
	wantEach(t, strings.ReplaceAll(string(out), "\r", ""), want)
}

func wantInOpenSSL(t *testing.T, file string, want []string) {
	t.Helper()
	args := []string{"pkcs12", "-in", file, "-nokeys", "-legacy", "-passin", "pass:changeit"}
	out, err := exec.Command("openssl", args...).CombinedOutput()
	if err != nil {
		t.Fatalf("openssl: %v\n%s", err, out)
	}
	wantEach(t, string(out), want)
}

func wantInJKS(t *testing.T, data []byte, want []string) {
	t.Helper()
	got := make(map[fingerprint]bool)
	err := errPassword
	for i := 0; i < len(passwords) && errors.Is(err, errPassword); i++ {
		_, err = scanJKS(bytes.NewReader(data), int64(len(data)-sha1.Size), passwords[i], anyLength, func(e jksEntry) {
			got[e.fingerprint] = e.certificate
		})
	}
	if err != nil {
		t.Fatal(err)
	}
	for i, c := range want {
		block, _ := pem.Decode([]byte(c))
		if parsed, err := newCertificate(block.Bytes); err != nil || !got[parsed.fingerprint] {
			t.Errorf("certificate %d is not in the keystore (%v)", i, err)
		}
	}
}

func wantEach(t *testing.T, out string, want []string) {
	t.Helper()
	for i, c := range want {
		if !strings.Contains(out, strings.TrimSpace(c)) {
			t.Errorf("certificate %d is not in the keystore:\n%s", i, out)
		}
	}
}

// FuzzKeystore changes arbitrary keystores. A change must be one that this package reads again, as no change.
func FuzzKeystore(f *testing.F) {
	for _, k := range keystores {
		f.Add(testFile(f, k.file))
	}
	wanted, err := parseCA(testFile(f, "image.pem"))
	if err != nil {
		f.Fatal(err)
	}
	other, err := parseCA(pki.NewCA("other").Cert)
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		r := &run{wanted: append(wanted, other...)}
		changed, ok := changeKeystore(t, r, data)
		if !ok {
			return
		}
		if again, ok := changeKeystore(t, r, changed); ok {
			t.Errorf("the changed keystore changes again, to %x", again)
		}
	})
}

// changeKeystore returns the changed keystore. ok is false if it cannot be changed, or need not be.
func changeKeystore(t *testing.T, r *run, data []byte) (changed []byte, ok bool) {
	t.Helper()
	change, err := r.changeOfKeystore(context.Background(), bytes.NewReader(data), int64(len(data)))
	if err != nil || change == nil {
		return nil, false
	}
	var out bytes.Buffer
	if err := change(&out); err != nil {
		t.Fatalf("writing the change: %v", err)
	}
	return out.Bytes(), true
}
