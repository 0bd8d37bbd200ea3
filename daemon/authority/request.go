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
	"errors"
	"fmt"
)

const requestType = "CERTIFICATE REQUEST"

// NewKey makes the key of a proxy's intermediate. mitmproxy uses it for the certificates of servers, too.
func NewKey() (crypto.Signer, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("making a key: %w", err)
	}
	return key, nil
}

// NewRequest returns a request for the intermediate of a node's proxy, in PEM. Its subject is the node's name alone.
func NewRequest(key crypto.Signer, node string) ([]byte, error) {
	template := &x509.CertificateRequest{Subject: pkix.Name{CommonName: node}}
	der, err := x509.CreateCertificateRequest(rand.Reader, template, key)
	if err != nil {
		return nil, fmt.Errorf("making the request for the intermediate of node %s: %w", node, err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: requestType, Bytes: der}), nil
}

// CheckRequest returns the public key of a request in PEM, or an error if it is not one that NewRequest makes for that
// node. A request with more in it is refused: this signer does not copy names or extensions from requests.
func CheckRequest(text []byte, node string) (crypto.PublicKey, error) {
	block, rest := pem.Decode(text)
	if block == nil || block.Type != requestType || len(rest) > 0 {
		return nil, errors.New("the request is not a single one in PEM")
	}
	r, err := x509.ParseCertificateRequest(block.Bytes)
	if err != nil {
		return nil, fmt.Errorf("parsing the request: %w", err)
	}
	if err := r.CheckSignature(); err != nil {
		return nil, fmt.Errorf("checking the signature of the request: %w", err)
	}
	if subject := (pkix.Name{CommonName: node}).String(); r.Subject.String() != subject {
		return nil, fmt.Errorf("the request is for %q, and the token that it came with is of node %q",
			r.Subject.String(), node)
	}
	if len(r.Extensions) > 0 {
		return nil, errors.New("the request asks for names or extensions")
	}
	switch key := r.PublicKey.(type) {
	case *ecdsa.PublicKey:
		if key.Curve == elliptic.P256() {
			return key, nil
		}
	case *rsa.PublicKey:
		if bits := key.N.BitLen(); bits >= 2048 && bits <= 4096 {
			return key, nil
		}
	}
	return nil, errors.New("the key of the request is neither ECDSA P-256 nor RSA of 2048 to 4096 bits")
}
