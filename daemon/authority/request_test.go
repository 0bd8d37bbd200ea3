package authority

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"net"
	"strings"
	"testing"
)

func TestCheckRequest(t *testing.T) {
	t.Parallel()
	p256, err := NewKey()
	if err != nil {
		t.Fatal(err)
	}
	p384, err := ecdsa.GenerateKey(elliptic.P384(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	rsa2048, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	encode := func(key crypto.Signer, r x509.CertificateRequest) []byte {
		der, err := x509.CreateCertificateRequest(rand.Reader, &r, key)
		if err != nil {
			t.Fatal(err)
		}
		return pem.EncodeToMemory(&pem.Block{Type: requestType, Bytes: der})
	}
	good, err := NewRequest(p256, "node-1")
	if err != nil {
		t.Fatal(err)
	}
	broken, _ := pem.Decode(good)
	broken.Bytes[len(broken.Bytes)-1] ^= 1 // the last byte of the signature
	name := pkix.Name{CommonName: "node-1"}
	for _, tc := range []struct {
		name string
		text []byte
		want string // part of the error; empty: it is in order
	}{
		{"as it should be", good, ""},
		{"RSA", encode(rsa2048, x509.CertificateRequest{Subject: name}), ""},
		{"P-384", encode(p384, x509.CertificateRequest{Subject: name}), "the key of the request"},
		{"another node", encode(p256, x509.CertificateRequest{Subject: pkix.Name{CommonName: "node-2"}}), "node-2"},
		{"no name", encode(p256, x509.CertificateRequest{}), "the request is for"},
		{
			"more than a name", encode(p256, x509.CertificateRequest{
				Subject: pkix.Name{CommonName: "node-1", Organization: []string{"system:masters"}},
			}), "system:masters",
		},
		{
			"two names", encode(p256, x509.CertificateRequest{Subject: pkix.Name{
				CommonName: "node-1", ExtraNames: []pkix.AttributeTypeAndValue{
					{Type: []int{2, 5, 4, 3}, Value: "node-1"}, {Type: []int{2, 5, 4, 3}, Value: "node-2"},
				},
			}}), "node-2",
		},
		{"a DNS name", encode(p256, x509.CertificateRequest{Subject: name, DNSNames: []string{"a"}}), "extensions"},
		{
			"an address",
			encode(p256, x509.CertificateRequest{Subject: name, IPAddresses: []net.IP{net.IPv4bcast}}), "extensions",
		},
		{"a broken signature", pem.EncodeToMemory(broken), "the signature"},
		{"two requests", append(append([]byte{}, good...), good...), "not a single one"},
		{"a certificate", EncodeCertificates(newRoot(t, epoch, year).Chain), "not a single one"},
		{"nothing", nil, "not a single one"},
		{"rubbish", pem.EncodeToMemory(&pem.Block{Type: requestType, Bytes: []byte("x")}), "parsing"},
	} {
		key, err := CheckRequest(tc.text, "node-1")
		switch {
		case tc.want == "" && (err != nil || key == nil):
			t.Errorf("%s: %v", tc.name, err)
		case tc.want != "" && (err == nil || !strings.Contains(err.Error(), tc.want)):
			t.Errorf("%s: got %v, want an error with %q", tc.name, err, tc.want)
		}
	}
}
