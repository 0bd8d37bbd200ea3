package nested

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha1"
	"crypto/x509"
	"encoding/base64"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-cni/sluice/integration/pki"
	"github.com/sluice-cni/sluice/integration/testbed"
)

// traces are signs of a CA in an image: parts of files, and parts of the names of files. The keys tell of them.
type traces struct {
	contents, names map[string][]byte
}

// newTraces reads the CA from a file in PEM.
func newTraces(t *testing.T, file string) traces {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	block, _ := pem.Decode(text)
	if block == nil {
		t.Fatalf("%s has no certificate", file)
	}
	certificate, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		t.Fatal(err)
	}
	// One line from the middle of the text: the key.
	const line = 64
	encoded := base64.StdEncoding.EncodeToString(certificate.Raw)
	middle := len(encoded) / 2 / line * line
	sum := sha1.Sum(certificate.Raw)
	s := traces{
		contents: map[string][]byte{
			"the certificate in DER": certificate.Raw,
			"the certificate in PEM": []byte(encoded[middle : middle+line]),
			"the subject in DER":     certificate.RawSubject,
			"the subject":            []byte(certificate.Subject.CommonName),
			"sluice's name":          []byte("sluice-ca"),
		},
		names: map[string][]byte{
			"the SHA-1": []byte(hex.EncodeToString(sum[:])), "sluice's name": []byte("sluice"),
		},
	}
	for name, option := range map[string]string{"the hash": "-subject_hash", "the old hash": "-subject_hash_old"} {
		hash := testbed.Run(t, "openssl", "x509", "-noout", option, "-in", file)
		s.names[name] = []byte(strings.TrimSpace(hash) + ".") // a folder of certificates has HASH.0
	}
	return s
}

// inLayer tells of the traces in a layer, which may be compressed.
func (s traces) inLayer(layer []byte) (found []string, err error) {
	var r io.Reader = bytes.NewReader(layer)
	if bytes.HasPrefix(layer, []byte{0x1f, 0x8b}) {
		if r, err = gzip.NewReader(r); err != nil {
			return nil, err
		}
	}
	for archive := tar.NewReader(r); ; {
		header, err := archive.Next()
		if errors.Is(err, io.EOF) {
			return found, nil
		}
		if err != nil {
			return nil, err
		}
		data, err := io.ReadAll(archive)
		if err != nil {
			return nil, err
		}
		for trace, name := range s.names {
			if bytes.Contains(bytes.ToLower([]byte(header.Name+" "+header.Linkname)), name) {
				found = append(found, fmt.Sprintf("%s is in the name of %s", trace, header.Name))
			}
		}
		for trace, content := range s.contents {
			if bytes.Contains(data, content) {
				found = append(found, fmt.Sprintf("%s is in %s", trace, header.Name))
			}
		}
	}
}

// inPushed tells of the traces in what was built and pushed as a repository.
func (l *lab) inPushed(s traces, repository string) (found []string) {
	l.t.Helper()
	config, layers, err := l.images.Pushed(repository)
	if err != nil {
		l.t.Fatal(err)
	}
	for trace, content := range s.contents {
		if bytes.Contains(config, content) {
			found = append(found, trace+" is in the configuration")
		}
	}
	for _, layer := range layers {
		more, err := s.inLayer(layer)
		if err != nil {
			l.t.Fatalf("a layer of %s: %v", repository, err)
		}
		found = append(found, more...)
	}
	return found
}

// TestTraces: every trace of a CA is found in a layer, and none where there is none.
func TestTraces(t *testing.T) {
	proxy, other := pki.NewCA("The proxy's CA"), pki.NewCA("Another CA")
	file := filepath.Join(t.TempDir(), "ca.pem")
	if err := os.WriteFile(file, proxy.Cert, 0o600); err != nil {
		t.Fatal(err)
	}
	s := newTraces(t, file)
	sum := sha1.Sum(proxy.Certificate.Raw)
	hash := strings.TrimSpace(testbed.Run(t, "openssl", "x509", "-noout", "-hash", "-in", file))
	for _, test := range []struct {
		subject, name string
		data          []byte
		traces        []string
	}{
		{"a bundle without it", "etc/ssl/cert.pem", other.Cert, nil},
		{"a bundle", "etc/ssl/cert.pem", append(other.Cert, proxy.Cert...), []string{"the certificate in PEM"}},
		{"DER in a keystore", "cacerts", append([]byte("x"), proxy.Certificate.Raw...),
			[]string{"the certificate in DER", "the subject in DER", "the subject"}},
		{"a link of OpenSSL's", "etc/ssl/certs/" + hash + ".0", nil, []string{"the hash"}},
		{"a name", "keys/" + strings.ToUpper(hex.EncodeToString(sum[:])), nil, []string{"the SHA-1"}},
		{"a text", "log", []byte("trusts The proxy's CA"), []string{"the subject"}},
		{"a file of sluice's", "usr/local/share/ca-certificates/sluice-ca-1.crt", nil, []string{"sluice's name"}},
	} {
		for _, compressed := range []bool{false, true} {
			found, err := s.inLayer(layerOf(t, test.name, test.data, compressed))
			if err != nil {
				t.Fatal(err)
			}
			var want []string
			for _, trace := range test.traces {
				in := " is in "
				if test.data == nil {
					in = " is in the name of "
				}
				want = append(want, trace+in+test.name)
			}
			slices.Sort(found)
			if !slices.Equal(found, want) {
				t.Errorf("%s, compressed: %t: got %q, want %q", test.subject, compressed, found, want)
			}
		}
	}
}

// layerOf is a layer with one file.
func layerOf(t *testing.T, name string, data []byte, compressed bool) []byte {
	t.Helper()
	var out bytes.Buffer
	var w io.WriteCloser = gzip.NewWriter(&out)
	archive := tar.NewWriter(w)
	if !compressed {
		archive = tar.NewWriter(&out)
	}
	err := archive.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: name, Size: int64(len(data)), Mode: 0o644})
	if err == nil {
		_, err = archive.Write(data)
	}
	if err = errors.Join(err, archive.Close()); err == nil && compressed {
		err = w.Close()
	}
	if err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}
