// Package pki creates the certificates of a cluster, and kubeconfigs with client certificates.
package pki

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"time"

	"sigs.k8s.io/yaml"
)

// lifetime is that of certificates. A cluster for tests runs for hours.
const lifetime = 30 * 24 * time.Hour

// Pair is a certificate and its key, in PEM.
type Pair struct {
	Cert, Key []byte
}

// CA issues certificates.
type CA struct {
	Pair
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

// NewCA creates a certificate authority.
func NewCA(name string) (*CA, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	template := certificate(name)
	template.IsCA, template.BasicConstraintsValid = true, true
	template.KeyUsage = x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, fmt.Errorf("signing the certificate of CA %s: %w", name, err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, err
	}
	keyPEM, err := encodeKey(key)
	if err != nil {
		return nil, err
	}
	return &CA{Pair{encode("CERTIFICATE", der), keyPEM}, cert, key}, nil
}

// Client issues a client certificate for a user with groups.
func (ca *CA) Client(user string, groups ...string) (Pair, error) {
	template := certificate(user, groups...)
	template.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}
	return ca.issue(template)
}

// Server issues a certificate for a server with DNS names and IP addresses.
func (ca *CA) Server(name string, names []string, addresses []net.IP) (Pair, error) {
	template := certificate(name)
	template.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
	template.DNSNames, template.IPAddresses = names, addresses
	return ca.issue(template)
}

func (ca *CA) issue(template *x509.Certificate) (Pair, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return Pair{}, err
	}
	template.KeyUsage = x509.KeyUsageDigitalSignature
	der, err := x509.CreateCertificate(rand.Reader, template, ca.cert, key.Public(), ca.key)
	if err != nil {
		return Pair{}, fmt.Errorf("signing the certificate of %s: %w", template.Subject, err)
	}
	keyPEM, err := encodeKey(key)
	return Pair{encode("CERTIFICATE", der), keyPEM}, err
}

func certificate(name string, organizations ...string) *x509.Certificate {
	now := time.Now()
	return &x509.Certificate{
		SerialNumber: big.NewInt(now.UnixNano()),
		Subject:      pkix.Name{CommonName: name, Organization: organizations},
		NotBefore:    now.Add(-time.Hour),
		NotAfter:     now.Add(lifetime),
	}
}

// SigningKey creates a key pair that signs and verifies ServiceAccount tokens, in PEM.
func SigningKey() ([]byte, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	return encodeKey(key)
}

func encodeKey(key *ecdsa.PrivateKey) ([]byte, error) {
	der, err := x509.MarshalECPrivateKey(key)
	return encode("EC PRIVATE KEY", der), err
}

func encode(kind string, der []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der})
}

// Kubeconfig returns a kubeconfig for the API server at url, with a client certificate for the user.
func (ca *CA) Kubeconfig(url, user string, groups ...string) ([]byte, error) {
	pair, err := ca.Client(user, groups...)
	if err != nil {
		return nil, err
	}
	const name = "sluice"
	return yaml.Marshal(map[string]any{
		"apiVersion":      "v1",
		"kind":            "Config",
		"current-context": name,
		"clusters": []any{map[string]any{"name": name, "cluster": map[string]any{
			"server": url, "certificate-authority-data": ca.Cert,
		}}},
		"users": []any{map[string]any{"name": user, "user": map[string]any{
			"client-certificate-data": pair.Cert, "client-key-data": pair.Key,
		}}},
		"contexts": []any{map[string]any{"name": name, "context": map[string]any{"cluster": name, "user": user}}},
	})
}
