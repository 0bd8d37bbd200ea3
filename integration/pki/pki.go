// Package pki makes the certificates of tests and of a cluster for tests:
//
//	ca := pki.NewCA("the proxy's CA")
//	server := ca.Server("example.test", []string{"example.test"}, nil)
//	config := &tls.Config{Certificates: []tls.Certificate{server.TLS()}}
//
// Nothing of it can fail but for an error of the caller, at which it panics.
package pki

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"time"
)

// lifetime is that of certificates. A cluster for tests runs for hours.
const lifetime = 30 * 24 * time.Hour

// Pair is a certificate and its key.
type Pair struct {
	Certificate *x509.Certificate
	Cert, Key   []byte // in PEM; the key in PKCS #8
	key         *ecdsa.PrivateKey
}

// TLS returns the pair for servers and clients of crypto/tls.
func (p Pair) TLS() tls.Certificate {
	return tls.Certificate{Certificate: [][]byte{p.Certificate.Raw}, PrivateKey: p.key}
}

// CA issues certificates.
type CA struct{ Pair }

// NewCA makes a root.
func NewCA(name string) CA { return NewCAOf(pkix.Name{CommonName: name}) }

// NewCAOf makes a root with a subject.
func NewCAOf(subject pkix.Name) CA {
	template := authority(subject)
	key := newKey()
	return CA{newPair(template, template, key, key)}
}

// Intermediate makes a CA below this one.
func (ca CA) Intermediate(name string) CA {
	return CA{ca.issue(authority(pkix.Name{CommonName: name}))}
}

// Client issues a client certificate for a user with groups.
func (ca CA) Client(user string, groups ...string) Pair {
	template := certificate(pkix.Name{CommonName: user, Organization: groups})
	template.KeyUsage = x509.KeyUsageDigitalSignature
	template.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}
	return ca.issue(template)
}

// Server issues a certificate for a server with DNS names and IP addresses.
func (ca CA) Server(name string, names []string, addresses []net.IP) Pair {
	template := certificate(pkix.Name{CommonName: name})
	template.KeyUsage = x509.KeyUsageDigitalSignature
	template.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
	template.DNSNames, template.IPAddresses = names, addresses
	return ca.issue(template)
}

func (ca CA) issue(template *x509.Certificate) Pair {
	return newPair(template, ca.Certificate, newKey(), ca.key)
}

func authority(subject pkix.Name) *x509.Certificate {
	template := certificate(subject)
	template.IsCA, template.BasicConstraintsValid = true, true
	template.KeyUsage = x509.KeyUsageCertSign | x509.KeyUsageCRLSign | x509.KeyUsageDigitalSignature
	return template
}

func certificate(subject pkix.Name) *x509.Certificate {
	now := time.Now()
	return &x509.Certificate{
		SerialNumber: big.NewInt(now.UnixNano()), Subject: subject,
		NotBefore: now.Add(-time.Hour), NotAfter: now.Add(lifetime),
	}
}

func newPair(template, parent *x509.Certificate, key, signer *ecdsa.PrivateKey) Pair {
	der := must(x509.CreateCertificate(rand.Reader, template, parent, key.Public(), signer))
	return Pair{
		Certificate: must(x509.ParseCertificate(der)),
		Cert:        pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}),
		Key:         encode(key),
		key:         key,
	}
}

// SigningKey makes a key pair that signs and verifies ServiceAccount tokens, in PEM. The API server reads the public
// key of it only in the format of SEC 1.
func SigningKey() []byte {
	der := must(x509.MarshalECPrivateKey(newKey()))
	return pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der})
}

func newKey() *ecdsa.PrivateKey { return must(ecdsa.GenerateKey(elliptic.P256(), rand.Reader)) }

func encode(key *ecdsa.PrivateKey) []byte {
	der := must(x509.MarshalPKCS8PrivateKey(key))
	return pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der})
}

func must[T any](value T, err error) T {
	if err != nil {
		panic(err)
	}
	return value
}
