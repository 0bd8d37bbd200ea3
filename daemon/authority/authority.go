// Package authority makes the certificates of a cluster's CA: a root that captured pods trust, and an intermediate for
// each node's proxy, which is valid for some days. It decides when a root gives way to the next one, and which requests
// for an intermediate are in order. It knows files, and no API server.
package authority

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha1" //nolint:gosec // for identifiers of keys
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"strings"
	"time"
)

const (
	// ownName begins the common name of each root that NewRoot makes.
	ownName = "sluice root "
	// maxCommonName is the limit of RFC 5280 in characters. Names of nodes may be longer.
	maxCommonName = 64
	// skew is the time by which a certificate is valid before it is made, for nodes with a slow clock.
	skew = time.Hour
)

// Authority is the certificate of a CA with its key: a root, an intermediate below one, or a proxy's intermediate.
type Authority struct {
	// Chain begins with the certificate of Key, and ends with a root, which is signed by itself.
	Chain []*x509.Certificate
	Key   crypto.Signer
}

// NewRoot makes a root. Of DNS names it can sign for those in the zones alone, unless there are no zones. Its name is
// unique: stores that find certificates by a hash of the name take one for the other otherwise.
func NewRoot(now time.Time, lifetime time.Duration, zones []string) (Authority, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return Authority{}, fmt.Errorf("making the key of a root: %w", err)
	}
	unique := make([]byte, 4)
	if _, err := rand.Read(unique); err != nil {
		return Authority{}, fmt.Errorf("naming a root: %w", err)
	}
	name := ownName + now.UTC().Format(time.DateOnly) + " " + hex.EncodeToString(unique)
	template := template(name, now, lifetime)
	template.MaxPathLen = 1
	if len(zones) > 0 {
		template.PermittedDNSDomainsCritical = true
		template.PermittedDNSDomains = zones
		// Addresses are not excluded: mitmproxy puts that of the server into each certificate, beside its names.
	}
	certificate, err := sign(template, template, key.Public(), key)
	if err != nil {
		return Authority{}, fmt.Errorf("signing root %q: %w", name, err)
	}
	return Authority{[]*x509.Certificate{certificate}, key}, nil
}

// Zones checks the DNS zones for NewRoot. A zone contains the name itself and all names below it.
func Zones(zones []string) error {
	for _, zone := range zones {
		if zone == "" || strings.Trim(zone, ".") != zone || strings.ContainsAny(zone, "*/:@ ") {
			return fmt.Errorf("%q is not a DNS zone such as example.com", zone)
		}
	}
	return nil
}

func template(name string, now time.Time, lifetime time.Duration) *x509.Certificate {
	return &x509.Certificate{
		Subject:               pkix.Name{Organization: []string{"sluice"}, CommonName: name},
		NotBefore:             now.Add(-skew),
		NotAfter:              now.Add(lifetime),
		KeyUsage:              x509.KeyUsageCertSign | x509.KeyUsageCRLSign,
		BasicConstraintsValid: true,
		IsCA:                  true,
	}
}

func sign(template, parent *x509.Certificate, public crypto.PublicKey, key crypto.Signer) (*x509.Certificate, error) {
	der, err := x509.CreateCertificate(rand.Reader, template, parent, public, key)
	if err != nil {
		return nil, err
	}
	return x509.ParseCertificate(der)
}

// Issue signs an intermediate for a node's proxy and returns its chain, which ends with the root. The intermediate ends
// with the authority at the latest. It can sign certificates of TLS servers, and no other CA.
func (a Authority) Issue(
	node string, public crypto.PublicKey, now time.Time, lifetime time.Duration,
) ([]*x509.Certificate, error) {
	if err := a.usable(now); err != nil {
		return nil, err
	}
	name := "sluice proxy of " + node
	if runes := []rune(name); len(runes) > maxCommonName {
		name = string(runes[:maxCommonName])
	}
	template := template(name, now, lifetime)
	template.MaxPathLenZero = true
	template.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
	var err error
	if template.SubjectKeyId, err = keyID(public); err != nil {
		return nil, fmt.Errorf("identifying the key of node %s: %w", node, err)
	}
	for _, c := range a.Chain {
		if c.NotAfter.Before(template.NotAfter) {
			template.NotAfter = c.NotAfter
		}
	}
	// Java and others do not look at the constraints of a root.
	signer := a.Chain[0]
	template.PermittedDNSDomainsCritical = signer.PermittedDNSDomainsCritical
	template.PermittedDNSDomains = signer.PermittedDNSDomains
	template.ExcludedDNSDomains = signer.ExcludedDNSDomains
	template.PermittedIPRanges = signer.PermittedIPRanges
	template.ExcludedIPRanges = signer.ExcludedIPRanges
	certificate, err := sign(template, signer, public, a.Key)
	if err != nil {
		return nil, fmt.Errorf("signing the intermediate of node %s: %w", node, err)
	}
	return append([]*x509.Certificate{certificate}, a.Chain...), nil
}

// keyID returns the identifier of a key as method 1 of RFC 5280 has it. mitmproxy 10.1 to 11 assume it in the
// certificates that they sign. With another one, such as Go's, OpenSSL does not find the intermediate and sends none.
func keyID(public crypto.PublicKey) ([]byte, error) {
	der, err := x509.MarshalPKIXPublicKey(public)
	if err != nil {
		return nil, err
	}
	var info struct {
		Algorithm pkix.AlgorithmIdentifier
		Key       asn1.BitString
	}
	if _, err := asn1.Unmarshal(der, &info); err != nil {
		return nil, err
	}
	id := sha1.Sum(info.Key.Bytes) //nolint:gosec // an identifier, and no proof
	return id[:], nil
}

// usable returns an error if a certificate of the chain is not valid at that time.
func (a Authority) usable(now time.Time) error {
	for _, c := range a.Chain {
		if now.Before(c.NotBefore) || now.After(c.NotAfter) {
			return fmt.Errorf("certificate %q is valid from %s to %s",
				c.Subject.CommonName, c.NotBefore.Format(time.RFC3339), c.NotAfter.Format(time.RFC3339))
		}
	}
	return nil
}

// Root returns the certificate that pods trust.
func (a Authority) Root() *x509.Certificate { return a.Chain[len(a.Chain)-1] }

// isOwn tells whether NewRoot has made the authority.
func (a Authority) isOwn() bool {
	return len(a.Chain) == 1 && strings.HasPrefix(a.Chain[0].Subject.CommonName, ownName)
}

// RenewAt is the time at which the authority is to be replaced: when a third of its life has passed since it was made.
func (a Authority) RenewAt() time.Time {
	made := a.Chain[0].NotBefore.Add(skew)
	return made.Add(a.Until().Sub(made) / 3)
}

// Until is the time at which the authority ends.
func (a Authority) Until() time.Time { return a.Chain[0].NotAfter }

// Parse reads an authority that can sign intermediates from PEM: its chain up to the root, and its key.
func Parse(chain, key []byte) (Authority, error) {
	a, err := parse(chain, key)
	if err != nil {
		return Authority{}, err
	}
	for below, c := range a.Chain {
		if c.MaxPathLen >= 0 && c.MaxPathLen < below+1 {
			return Authority{}, fmt.Errorf("certificate %q allows a path length of %d, and needs at least %d",
				c.Subject.CommonName, c.MaxPathLen, below+1)
		}
	}
	return a, nil
}

// Answer reads the chain in PEM that answers the request that was made with key.
func Answer(chain []byte, key crypto.Signer) (Authority, error) {
	text, err := EncodeKey(key)
	if err != nil {
		return Authority{}, err
	}
	return parse(chain, text)
}

// parse reads an authority from PEM.
func parse(chain, key []byte) (Authority, error) {
	certificates, err := ParseCertificates(chain)
	if err != nil {
		return Authority{}, err
	}
	pair, err := tls.X509KeyPair(chain, key) // it compares the key with the first certificate
	if err != nil {
		return Authority{}, err
	}
	signer, ok := pair.PrivateKey.(crypto.Signer)
	if !ok {
		return Authority{}, errors.New("the key cannot sign")
	}
	a := Authority{certificates, signer}
	return a, a.check()
}

// check returns an error unless each certificate is a CA's, and is signed by the next one, and the last one by itself.
func (a Authority) check() error {
	for i, c := range a.Chain {
		next := a.Chain[min(i+1, len(a.Chain)-1)]
		switch {
		case !c.BasicConstraintsValid || !c.IsCA:
			return fmt.Errorf("certificate %q is not one of a CA", c.Subject.CommonName)
		case c.KeyUsage != 0 && c.KeyUsage&x509.KeyUsageCertSign == 0:
			return fmt.Errorf("certificate %q may not sign certificates", c.Subject.CommonName)
		case c.CheckSignatureFrom(next) == nil:
		case next == c:
			return fmt.Errorf("the chain ends with %q, which is not a root: add the certificates up to the root",
				c.Subject.CommonName)
		default:
			return fmt.Errorf("certificate %q is not signed by %q, the next one",
				c.Subject.CommonName, next.Subject.CommonName)
		}
	}
	return nil
}

// ParseCertificates reads one or more certificates in PEM.
func ParseCertificates(text []byte) ([]*x509.Certificate, error) {
	var certificates []*x509.Certificate
	for {
		var block *pem.Block
		if block, text = pem.Decode(text); block == nil {
			break
		}
		if block.Type != "CERTIFICATE" {
			continue
		}
		c, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			return nil, fmt.Errorf("parsing certificate %d: %w", len(certificates)+1, err)
		}
		certificates = append(certificates, c)
	}
	if len(certificates) == 0 {
		return nil, errors.New("there is no certificate in PEM")
	}
	return certificates, nil
}

// EncodeCertificates returns certificates in PEM.
func EncodeCertificates(certificates []*x509.Certificate) []byte {
	var text []byte
	for _, c := range certificates {
		text = append(text, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: c.Raw})...)
	}
	return text
}

// EncodeKey returns a private key in PEM.
func EncodeKey(key crypto.Signer) ([]byte, error) {
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, fmt.Errorf("encoding a key: %w", err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}), nil
}
