package truststore

import (
	"context"
	"crypto/hmac"
	"crypto/sha1" //nolint:gosec // older keystores have it
	"crypto/sha256"
	"crypto/sha512"
	"crypto/subtle"
	"encoding/asn1"
	"encoding/binary"
	"errors"
	"fmt"
	"hash"
	"io"
	"slices"
	"unicode/utf16"
)

// A keystore of the type PKCS12 (RFC 7292) is a sequence of content infos inside of an octet string, with a MAC over
// that string:
//
//	PFX ::= SEQUENCE { version, authSafe ContentInfo { data, OCTET STRING { SEQUENCE OF ContentInfo } }, macData }
//
// Certificates are added as a content info of their own, not encrypted, at the end. Those of others are copied as they
// are, encrypted or not, and only the MAC needs the password. Java reads both kinds in one keystore. The cacerts of
// OpenJDK 18 and later have neither encryption nor MAC.

// maxPKCS12 bounds the size of a keystore, which is read as a whole. OpenJDK's is 200 KiB.
const maxPKCS12 = 4 << 20

// maxIterations bounds the time to derive the key of a MAC. Java's default is 10,000, and was 100,000.
const maxIterations = 300_000

const derSequence = asn1.TagSequence | constructed

var (
	oidData         = asn1.ObjectIdentifier{1, 2, 840, 113549, 1, 7, 1}
	oidCertBag      = asn1.ObjectIdentifier{1, 2, 840, 113549, 1, 12, 10, 1, 3}
	oidX509         = asn1.ObjectIdentifier{1, 2, 840, 113549, 1, 9, 22, 1}
	oidFriendlyName = asn1.ObjectIdentifier{1, 2, 840, 113549, 1, 9, 20}
	// oidTrusted is Java's attribute of a trusted certificate; its value is the allowed use.
	oidTrusted = asn1.ObjectIdentifier{2, 16, 840, 1, 113894, 746875, 1, 1}
	oidAnyUse  = asn1.ObjectIdentifier{2, 5, 29, 37, 0}
)

type pfx struct {
	Version  int
	AuthSafe contentInfo
	MacData  macData `asn1:"optional"`
}

type contentInfo struct {
	Type    asn1.ObjectIdentifier
	Content asn1.RawValue `asn1:"tag:0,explicit,optional"`
}

type macData struct {
	Mac        digestInfo
	Salt       []byte
	Iterations int `asn1:"optional,default:1"`
}

type digestInfo struct {
	Algorithm algorithm
	Digest    []byte
}

type algorithm struct {
	Algorithm  asn1.ObjectIdentifier
	Parameters asn1.RawValue `asn1:"optional"`
}

type safeBag struct {
	ID         asn1.ObjectIdentifier
	Value      asn1.RawValue `asn1:"tag:0,explicit"`
	Attributes []attribute   `asn1:"set,optional"`
}

type certBag struct {
	ID   asn1.ObjectIdentifier
	Data []byte `asn1:"tag:0,explicit"`
}

type attribute struct {
	ID    asn1.ObjectIdentifier
	Value asn1.RawValue `asn1:"set"`
}

// digests are the hashes of a MAC.
var digests = []struct {
	oid   asn1.ObjectIdentifier
	make  func() hash.Hash
	block int
}{
	{asn1.ObjectIdentifier{1, 3, 14, 3, 2, 26}, sha1.New, sha1.BlockSize},
	{asn1.ObjectIdentifier{2, 16, 840, 1, 101, 3, 4, 2, 1}, sha256.New, sha256.BlockSize},
	{asn1.ObjectIdentifier{2, 16, 840, 1, 101, 3, 4, 2, 2}, sha512.New384, sha512.BlockSize},
	{asn1.ObjectIdentifier{2, 16, 840, 1, 101, 3, 4, 2, 3}, sha512.New, sha512.BlockSize},
}

// changeOfPKCS12 compares a keystore with the wanted certificates.
func (r *run) changeOfPKCS12(ctx context.Context, f io.ReaderAt) (change, error) {
	data, err := io.ReadAll(io.LimitReader(readerOf(ctx, f), maxPKCS12+1))
	if err != nil {
		return nil, fmt.Errorf("reading the keystore: %w", err)
	}
	if len(data) > maxPKCS12 {
		return nil, fmt.Errorf("reading the keystore: it has more than %d bytes", maxPKCS12)
	}
	changed, err := r.changePKCS12(data)
	if err != nil || changed == nil {
		return nil, err
	}
	return func(w io.Writer) error { return writeAll(w, changed...) }, nil
}

// changePKCS12 returns the parts of the changed keystore, or none if it is as it should be.
func (r *run) changePKCS12(data []byte) ([][]byte, error) {
	var store pfx
	if rest, err := asn1.Unmarshal(data, &store); err != nil {
		return nil, fmt.Errorf("parsing the keystore: %w", err)
	} else if len(rest) > 0 || store.Version != 3 {
		return nil, fmt.Errorf("parsing the keystore: version %d, %d bytes after it", store.Version, len(rest))
	}
	safe, err := dataOf(store.AuthSafe)
	if err != nil {
		return nil, fmt.Errorf("parsing the keystore: %w", err)
	}
	contents, err := elements(safe)
	if err != nil {
		return nil, fmt.Errorf("parsing the contents of the keystore: %w", err)
	}
	kept, missing, changed := r.compareContents(contents)
	if !changed {
		return nil, nil
	}
	key, err := store.MacData.key(safe) // of the old MAC, before any work
	if err != nil {
		return nil, err
	}
	if len(missing) > 0 {
		added, err := contentOf(missing)
		if err != nil {
			return nil, err
		}
		kept = append(kept, added)
	}
	return store.encode(kept, key)
}

// compareContents returns the content infos that stay, and the certificates that are to be added.
func (r *run) compareContents(contents [][]byte) (kept [][]byte, missing []certificate, changed bool) {
	have := make(map[fingerprint]bool)
	for _, content := range contents {
		certificates, own := certificatesIn(content)
		unwanted := slices.ContainsFunc(certificates, func(f fingerprint) bool { return !r.isWanted(f) })
		if own && unwanted {
			changed = true
			continue
		}
		for _, f := range certificates {
			have[f] = true
		}
		kept = append(kept, content)
	}
	for _, c := range r.wanted {
		if !have[c.fingerprint] {
			missing = append(missing, c)
		}
	}
	return kept, missing, changed || len(missing) > 0
}

// certificatesIn returns the certificates of a content info that is not encrypted. own says that all of them have an
// alias of ours. Contents that cannot be parsed are those of others.
func certificatesIn(content []byte) (found []fingerprint, own bool) {
	var info contentInfo
	if _, err := asn1.Unmarshal(content, &info); err != nil {
		return nil, false
	}
	data, err := dataOf(info)
	if err != nil {
		return nil, false
	}
	bags, err := elements(data)
	if err != nil {
		return nil, false
	}
	own = len(bags) > 0
	for _, encoded := range bags {
		var bag safeBag
		if _, err := asn1.Unmarshal(encoded, &bag); err != nil || !bag.ID.Equal(oidCertBag) {
			own = false
			continue
		}
		own = own && isOurAlias(bag.alias())
		var inner certBag
		if _, err := asn1.Unmarshal(bag.Value.Bytes, &inner); err == nil && inner.ID.Equal(oidX509) {
			found = append(found, sha256.Sum256(inner.Data))
		}
	}
	return found, own
}

// alias is the friendly name of a bag.
func (b safeBag) alias() string {
	for _, a := range b.Attributes {
		var value asn1.RawValue
		if !a.ID.Equal(oidFriendlyName) {
			continue
		}
		if _, err := asn1.Unmarshal(a.Value.Bytes, &value); err != nil || len(value.Bytes)%2 != 0 {
			continue
		}
		units := make([]uint16, len(value.Bytes)/2)
		for i := range units {
			units[i] = binary.BigEndian.Uint16(value.Bytes[2*i:])
		}
		return string(utf16.Decode(units))
	}
	return ""
}

// dataOf returns the octets of a content info of the type data.
func dataOf(info contentInfo) ([]byte, error) {
	if !info.Type.Equal(oidData) {
		return nil, fmt.Errorf("contents of the type %s where data belongs", info.Type)
	}
	var octets []byte
	if _, err := asn1.Unmarshal(info.Content.Bytes, &octets); err != nil {
		return nil, fmt.Errorf("parsing the octets of the contents: %w", err)
	}
	return octets, nil
}

// elements returns the encoded elements of a sequence.
func elements(sequence []byte) ([][]byte, error) {
	var outer asn1.RawValue
	if rest, err := asn1.Unmarshal(sequence, &outer); err != nil {
		return nil, fmt.Errorf("parsing a sequence: %w", err)
	} else if outer.Class != asn1.ClassUniversal || outer.Tag != asn1.TagSequence || len(rest) > 0 {
		return nil, errors.New("parsing a sequence: there is none, or data after it")
	}
	var found [][]byte
	for data := outer.Bytes; len(data) > 0; {
		var element asn1.RawValue
		rest, err := asn1.Unmarshal(data, &element)
		if err != nil {
			return nil, fmt.Errorf("parsing an element of a sequence: %w", err)
		}
		found = append(found, element.FullBytes)
		data = rest
	}
	return found, nil
}

// contentOf encodes certificates as a content info that is not encrypted.
func contentOf(certificates []certificate) ([]byte, error) {
	var bags [][]byte
	for _, c := range certificates {
		bag, err := bagOf(c)
		if err != nil {
			return nil, fmt.Errorf("encoding %s: %w", c.name, err)
		}
		bags = append(bags, bag)
	}
	return wrapData(derValue(derSequence, bags...))
}

// wrapData encodes a content info of the type data.
func wrapData(octets []byte) ([]byte, error) {
	oid, err := asn1.Marshal(oidData)
	if err != nil {
		return nil, fmt.Errorf("encoding a content info: %w", err)
	}
	return derValue(derSequence, oid, derValue(derExplicit0, derValue(asn1.TagOctetString, octets))), nil
}

// derExplicit0 is the tag [0] EXPLICIT.
const derExplicit0 = asn1.ClassContextSpecific<<6 | constructed

func bagOf(c certificate) ([]byte, error) {
	inner, err := asn1.Marshal(certBag{ID: oidX509, Data: c.der})
	if err != nil {
		return nil, err
	}
	use, err := asn1.Marshal(oidAnyUse)
	if err != nil {
		return nil, err
	}
	set := func(element []byte) asn1.RawValue {
		return asn1.RawValue{Tag: asn1.TagSet, IsCompound: true, Bytes: element}
	}
	return asn1.Marshal(safeBag{
		ID:    oidCertBag,
		Value: asn1.RawValue{Class: asn1.ClassContextSpecific, Tag: 0, IsCompound: true, Bytes: inner},
		Attributes: []attribute{
			{ID: oidFriendlyName, Value: set(derValue(asn1.TagBMPString, bmpString(c.name)))},
			{ID: oidTrusted, Value: set(use)},
		},
	})
}

// encode returns the parts of a keystore with other contents. A key is that of its MAC.
func (p pfx) encode(contents [][]byte, key *macKey) ([][]byte, error) {
	safe := derValue(derSequence, contents...)
	wrapped, err := wrapData(safe)
	if err != nil {
		return nil, err
	}
	version, err := asn1.Marshal(p.Version)
	if err != nil {
		return nil, fmt.Errorf("encoding the keystore: %w", err)
	}
	parts := [][]byte{version, wrapped}
	if key != nil {
		p.MacData.Mac.Digest = key.mac(safe)
		encoded, err := asn1.Marshal(p.MacData)
		if err != nil {
			return nil, fmt.Errorf("encoding the MAC of the keystore: %w", err)
		}
		parts = append(parts, encoded)
	}
	return slices.Insert(parts, 0, derHeader(derSequence, length(parts))), nil
}

func length(parts [][]byte) int {
	sum := 0
	for _, p := range parts {
		sum += len(p)
	}
	return sum
}

// macKey is the key of a keystore's MAC.
type macKey struct {
	hash func() hash.Hash
	key  []byte
}

func (k *macKey) mac(data []byte) []byte {
	h := hmac.New(k.hash, k.key)
	h.Write(data)
	return h.Sum(nil)
}

// key finds the password by which the MAC was made, and returns its key. A keystore without a MAC has none.
func (m macData) key(safe []byte) (*macKey, error) {
	if len(m.Mac.Digest) == 0 {
		return nil, nil //nolint:nilnil // no MAC, no key
	}
	if m.Iterations < 1 || m.Iterations > maxIterations {
		return nil, fmt.Errorf("reading the MAC: %d iterations, not 1 to %d", m.Iterations, maxIterations)
	}
	for _, d := range digests {
		if !d.oid.Equal(m.Mac.Algorithm.Algorithm) {
			continue
		}
		for _, p := range passwords {
			key := &macKey{hash: d.make, key: deriveMACKey(d.make, d.block, m.Salt, p, m.Iterations)}
			if subtle.ConstantTimeCompare(key.mac(safe), m.Mac.Digest) == 1 {
				return key, nil
			}
		}
		return nil, errors.New("reading the keystore: its password is none of the usual ones")
	}
	return nil, fmt.Errorf("reading the MAC of the keystore: unknown algorithm %s", m.Mac.Algorithm.Algorithm)
}

// deriveMACKey derives a key as RFC 7292, appendix B.2, says, with the ID 3. A MAC's key is as long as its hash, so the
// first round, A_1, is all of it.
func deriveMACKey(newHash func() hash.Hash, block int, salt []byte, password string, iterations int) []byte {
	fill := func(data []byte) []byte { // repeats data up to a multiple of the block
		var filled []byte
		for len(data) > 0 && len(filled) < (len(data)+block-1)/block*block {
			filled = append(filled, data[len(filled)%len(data)])
		}
		return filled
	}
	h := newHash()
	h.Write(slices.Repeat([]byte{3}, block))
	h.Write(fill(salt))
	h.Write(fill(append(bmpString(password), 0, 0)))
	key := h.Sum(nil)
	for range iterations - 1 {
		h.Reset()
		h.Write(key)
		key = h.Sum(key[:0])
	}
	return key
}
