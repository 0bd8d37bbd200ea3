package truststore

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/pem"
	"strings"
	"testing"

	"github.com/sluice-cni/sluice/integration/pki"
)

func TestBundles(t *testing.T) {
	image, ca := string(pki.NewCA("image").Cert), string(pki.NewCA("proxy").Cert)
	marked := marker + "\n"
	old := string(pki.NewCA("old").Cert)
	for _, test := range []struct {
		name, bundle, want string
		failed             string
	}{
		{name: "empty", bundle: "", want: marked + ca},
		{name: "a certificate", bundle: image, want: image + marked + ca},
		{name: "no newline at the end", bundle: strings.TrimSpace(image), want: image + marked + ca},
		{name: "comments", bundle: "# a\n\n" + image + "# b\n", want: "# a\n\n" + image + "# b\n" + marked + ca},
		{name: "CRLF", bundle: crlf(image), want: crlf(image) + marked + ca},
		{name: "already there", bundle: ca + image, want: ca + image},
		{name: "already there, CRLF", bundle: crlf(ca), want: crlf(ca)},
		{name: "already ours", bundle: marked + ca + image, want: marked + ca + image},
		{name: "ours twice", bundle: marked + ca + marked + ca, want: marked + ca},
		{name: "an old one", bundle: marked + old + image, want: image + marked + ca},
		{name: "an old one in the middle", bundle: image + marked + old + "# c\n", want: image + "# c\n" + marked + ca},
		{name: "a marker alone", bundle: marked + "\n" + image, want: marked + "\n" + image + marked + ca},
		{name: "other PEM", bundle: strings.ReplaceAll(image, "CERTIFICATE", "TRUSTED CERTIFICATE"),
			want: strings.ReplaceAll(image, "CERTIFICATE", "TRUSTED CERTIFICATE") + marked + ca},
		{name: "bad base64", bundle: "-----BEGIN CERTIFICATE-----\n!\n-----END CERTIFICATE-----\n",
			want: "-----BEGIN CERTIFICATE-----\n!\n-----END CERTIFICATE-----\n" + marked + ca},
		{name: "no end", bundle: image + pemBegin + "\nAAAA\n", failed: "the last certificate has no end"},
		{name: "binary", bundle: "\x30\x00\x01", failed: "not PEM"},
		{name: "a long line", bundle: strings.Repeat("a", maxLine+1), failed: "a line is longer"},
		{name: "a long certificate", bundle: pemBegin + strings.Repeat("\n"+strings.Repeat("A", 64), 4*maxCA/64),
			failed: "a certificate is longer"},
	} {
		t.Run(test.name, func(t *testing.T) {
			root := tree(t, map[string]string{debianBundle: test.bundle})
			report := add(t, root, []byte(ca))
			if test.failed != "" {
				test.want = test.bundle
			}
			if got := read(t, root, debianBundle); got != test.want {
				t.Errorf("got\n%s\nwant\n%s", got, test.want)
			}
			got := report.store(t, debianBundle).Error
			if (got == "") != (test.failed == "") || !strings.Contains(got, test.failed) {
				t.Errorf("got the error %q, want %q", got, test.failed)
			}
		})
	}
}

func crlf(text string) string { return strings.ReplaceAll(text, "\n", "\r\n") }

// FuzzBundle compares scanPEM with encoding/pem, which takes the whole file, and changes arbitrary bundles.
func FuzzBundle(f *testing.F) {
	image := testFile(f, "image.pem")
	f.Add(image)
	f.Add(append([]byte(marker+"\n"), image...))
	f.Add([]byte(crlf(string(image)) + "# x\n" + pemBegin + "\nAAAA\n" + pemEnd))
	wanted, err := parseCA(pki.NewCA("proxy").Cert)
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		var blocks []pemBlock
		scan, err := scanPEM(bytes.NewReader(data), anyLength, func(b pemBlock) { blocks = append(blocks, b) })
		if err != nil {
			return
		}
		if scan.size != int64(len(data)) {
			t.Fatalf("read %d of %d bytes", scan.size, len(data))
		}
		for _, b := range blocks {
			block, _ := pem.Decode(data[b.from:b.to])
			if b.valid && block != nil && len(block.Headers) == 0 && b.fingerprint != sha256.Sum256(block.Bytes) {
				t.Errorf("another fingerprint than encoding/pem for\n%s", data[b.from:b.to])
			}
		}
		changed := changeBundle(t, wanted, data)
		if changed == nil {
			t.Fatal("the certificate is there without a change")
		}
		if again := changeBundle(t, wanted, changed); again != nil {
			t.Errorf("the changed bundle changes again, to\n%s", again)
		}
	})
}

// changeBundle returns the changed bundle, or nil if it does not change.
func changeBundle(t *testing.T, wanted []certificate, data []byte) []byte {
	t.Helper()
	change, err := (&run{wanted: wanted}).changeOfBundle(context.Background(), bytes.NewReader(data))
	if err != nil {
		t.Fatal(err)
	}
	if change == nil {
		return nil
	}
	var out bytes.Buffer
	if err := change(&out); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}
