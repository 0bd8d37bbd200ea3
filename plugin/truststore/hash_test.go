package truststore

import (
	"crypto/x509/pkix"
	"encoding/asn1"
	"encoding/pem"
	"os/exec"
	"strings"
	"testing"

	"github.com/sluice-cni/sluice/integration/pki"
)

// TestSubjectHash compares with openssl.
func TestSubjectHash(t *testing.T) {
	country := asn1.ObjectIdentifier{2, 5, 4, 6}
	commonName := asn1.ObjectIdentifier{2, 5, 4, 3}
	// value is a string of a type that Go does not make by itself.
	value := func(tag int, bytes string) asn1.RawValue { return asn1.RawValue{Tag: tag, Bytes: []byte(bytes)} }
	one := func(kind asn1.ObjectIdentifier, v asn1.RawValue) pkix.Name {
		return pkix.Name{ExtraNames: []pkix.AttributeTypeAndValue{{Type: kind, Value: v}}}
	}
	names := map[string]pkix.Name{
		"plain":          {CommonName: "mitmproxy", Organization: []string{"mitmproxy"}},
		"case":           {CommonName: "ISRG Root X1", Country: []string{"US"}},
		"white space":    {CommonName: "  a \t b   c "},
		"UTF-8":          {CommonName: "Főtanúsítvány ÄÖ"},
		"only spaces":    {CommonName: "   "},
		"empty subject":  {},
		"several values": {Organization: []string{"b", "A", "aa"}, OrganizationalUnit: []string{"z", "Y"}},
		"T61":            one(commonName, value(asn1.TagT61String, "Caf\xe9 X")),
		"BMP":            one(commonName, value(asn1.TagBMPString, "\x00A\x00 \x00 \x01\x50")),
		"IA5":            one(commonName, value(asn1.TagIA5String, " A@b")),
		"numeric":        one(country, value(asn1.TagNumericString, "1  2")),
	}
	for name, subject := range names {
		t.Run(name, func(t *testing.T) {
			ca := pki.NewCAOf(subject).Cert
			cmd := exec.Command("openssl", "x509", "-noout", "-subject_hash")
			cmd.Stdin = strings.NewReader(string(ca))
			out, err := cmd.Output()
			if err != nil {
				t.Fatalf("openssl: %v", err)
			}
			block, _ := pem.Decode(ca)
			c, err := newCertificate(block.Bytes)
			if err != nil {
				t.Fatal(err)
			}
			if want := strings.TrimSpace(string(out)); c.hash != want {
				t.Errorf("got %s, want %s", c.hash, want)
			}
		})
	}
}
