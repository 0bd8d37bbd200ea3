package truststore

import (
	"bufio"
	"context"
	"crypto/sha1" //nolint:gosec // the format's digest
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"hash"
	"io"
	"strings"
	"time"
)

// A keystore of the type JKS, as sun.security.provider.JavaKeyStore writes it, all integers big endian:
//
//	magic (4) version (4) count (4) entry… digest (20)
//	entry: tag (4) alias (2 + n) milliseconds (8), then
//	  tag 1, private key: key (4 + n), count (4), certificate…
//	  tag 2, trusted certificate: certificate
//	certificate: type (2 + n), from version 2 on, and DER (4 + n)
//
// The digest is SHA-1 of the password in UTF-16, "Mighty Aphrodite" and all before the digest. The certificates are not
// encrypted, so entries can be added and dropped as bytes; those of others are copied as they are. JCEKS is the same
// but for its magic and secret keys.
const (
	magicJKS   = 0xfeedfeed
	magicJCEKS = 0xcececece

	tagPrivateKey  = 1
	tagCertificate = 2

	// headerJKS is the length of all before the first entry.
	headerJKS = 12
	saltJKS   = "Mighty Aphrodite"
	typeX509  = "X.509"

	// maxEntriesJKS and maxChain bound the counts that a file claims.
	maxEntriesJKS = 20_000
	maxChain      = 100
)

// passwords are tried in turn: the default, the one of macOS and some application servers, and none.
var passwords = []string{"changeit", "changeme", ""}

// jksEntry is an entry of a keystore.
type jksEntry struct {
	span
	alias       string
	certificate bool        // and not a private key
	fingerprint fingerprint // if the certificate is of a length to look for
}

// jksScan is the outcome of reading a keystore.
type jksScan struct {
	magic, version uint32
	count          int
	size           int64 // without the digest
}

// jksReader reads a keystore as a stream.
type jksReader struct {
	r     *bufio.Reader
	at    int64
	mayBe func(length int) bool
}

func (r *jksReader) take(n int64) ([]byte, error) {
	data := make([]byte, n)
	read, err := io.ReadFull(r.r, data)
	r.at += int64(read)
	if err != nil {
		return nil, fmt.Errorf("reading the keystore at byte %d: %w", r.at, unexpected(err))
	}
	return data, nil
}

func (r *jksReader) skip(n int64) error {
	skipped, err := io.CopyN(io.Discard, r.r, n)
	r.at += skipped
	if err != nil {
		return fmt.Errorf("reading the keystore at byte %d: %w", r.at, unexpected(err))
	}
	return nil
}

// unexpected makes the end of a file an error of its contents.
func unexpected(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

func (r *jksReader) uint32() (uint32, error) {
	data, err := r.take(4)
	if err != nil {
		return 0, err
	}
	return binary.BigEndian.Uint32(data), nil
}

func (r *jksReader) text() (string, error) {
	data, err := r.take(2)
	if err != nil {
		return "", err
	}
	data, err = r.take(int64(binary.BigEndian.Uint16(data)))
	return string(data), err
}

// errPassword is the error of a keystore with a digest that was made with another password.
var errPassword = errors.New("reading the keystore: its password is none of the usual ones")

// scanJKS reads a keystore of which size bytes come before the digest, checks the digest, and calls visit for each
// entry. Only those certificates are hashed whose length may be one of those to look for.
func scanJKS(
	r io.Reader, size int64, password string, mayBe func(length int) bool, visit func(jksEntry),
) (jksScan, error) {
	scan := jksScan{size: size}
	digest := jksDigest(password)
	body := io.TeeReader(io.LimitReader(r, size), digest)
	in := &jksReader{r: bufio.NewReaderSize(body, 32<<10), mayBe: mayBe}
	if err := in.entries(&scan, visit); err != nil {
		return scan, err
	}
	if in.at != size {
		return scan, fmt.Errorf("reading the keystore: %d bytes after the last entry", size-in.at)
	}
	var stored [sha1.Size]byte
	if _, err := io.ReadFull(r, stored[:]); err != nil {
		return scan, fmt.Errorf("reading the digest of the keystore: %w", unexpected(err))
	}
	if [sha1.Size]byte(digest.Sum(nil)) != stored {
		return scan, errPassword
	}
	return scan, nil
}

func jksDigest(password string) hash.Hash {
	digest := sha1.New() //nolint:gosec // the format's digest
	digest.Write(bmpString(password))
	digest.Write([]byte(saltJKS))
	return digest
}

func (r *jksReader) entries(scan *jksScan, visit func(jksEntry)) error {
	header, err := r.take(headerJKS)
	if err != nil {
		return err
	}
	scan.magic, scan.version = binary.BigEndian.Uint32(header), binary.BigEndian.Uint32(header[4:])
	count := binary.BigEndian.Uint32(header[8:])
	if scan.version != 1 && scan.version != 2 {
		return fmt.Errorf("reading the keystore: version %d is unknown", scan.version)
	}
	if count > maxEntriesJKS {
		return fmt.Errorf("reading the keystore: %d entries, more than %d", count, maxEntriesJKS)
	}
	for scan.count = 0; scan.count < int(count); scan.count++ {
		entry, err := r.entry(scan.version)
		if err != nil {
			return err
		}
		visit(entry)
	}
	return nil
}

func (r *jksReader) entry(version uint32) (jksEntry, error) {
	entry := jksEntry{span: span{from: r.at}}
	tag, err := r.uint32()
	if err != nil {
		return entry, err
	}
	if entry.alias, err = r.text(); err != nil {
		return entry, err
	}
	if err := r.skip(8); err != nil { // its date
		return entry, err
	}
	switch tag {
	case tagCertificate:
		entry.certificate = true
		entry.fingerprint, err = r.certificate(version)
	case tagPrivateKey:
		err = r.privateKey(version)
	default:
		err = fmt.Errorf("reading the keystore at byte %d: an entry of the unknown type %d", entry.from, tag)
	}
	entry.to = r.at
	return entry, err
}

func (r *jksReader) privateKey(version uint32) error {
	length, err := r.uint32()
	if err != nil {
		return err
	}
	if err := r.skip(int64(length)); err != nil {
		return err
	}
	chain, err := r.uint32()
	if err != nil {
		return err
	}
	if chain > maxChain {
		return fmt.Errorf("reading the keystore at byte %d: a chain of %d certificates", r.at, chain)
	}
	for range chain {
		if _, err := r.certificate(version); err != nil {
			return err
		}
	}
	return nil
}

// certificate reads a certificate, and hashes it if it may be one of those to look for.
func (r *jksReader) certificate(version uint32) (fingerprint, error) {
	if version == 2 {
		if _, err := r.text(); err != nil {
			return fingerprint{}, err
		}
	}
	length, err := r.uint32()
	if err != nil {
		return fingerprint{}, err
	}
	if !r.mayBe(int(length)) {
		return fingerprint{}, r.skip(int64(length))
	}
	digest := sha256.New()
	hashed, err := io.CopyN(digest, r.r, int64(length))
	r.at += hashed
	if err != nil {
		return fingerprint{}, fmt.Errorf("reading the keystore at byte %d: %w", r.at, unexpected(err))
	}
	return fingerprint(digest.Sum(nil)), nil
}

// isOurAlias recognises our aliases, also with the prefix that Debian's hook of update-ca-certificates gives them.
func isOurAlias(alias string) bool {
	return strings.HasPrefix(strings.TrimPrefix(strings.ToLower(alias), "debian:"), namePrefix)
}

// changeOfKeystore compares a keystore of Java with the wanted certificates.
func (r *run) changeOfKeystore(ctx context.Context, f io.ReaderAt, size int64) (change, error) {
	var magic [4]byte
	if _, err := f.ReadAt(magic[:], 0); err != nil {
		return nil, fmt.Errorf("reading the keystore: %w", unexpected(err))
	}
	switch number := binary.BigEndian.Uint32(magic[:]); {
	case number == magicJKS, number == magicJCEKS:
		return r.changeOfJKS(ctx, f, size)
	case magic[0] == derSequence:
		return r.changeOfPKCS12(ctx, f)
	default:
		return nil, fmt.Errorf("reading the keystore: neither JKS nor PKCS12 (it begins with %x)", magic)
	}
}

// changeOfJKS tries one password after the other: the first one is right for nearly all keystores.
func (r *run) changeOfJKS(ctx context.Context, f io.ReaderAt, size int64) (change, error) {
	for _, password := range passwords {
		change, err := r.changeWithPassword(ctx, f, size, password)
		if !errors.Is(err, errPassword) {
			return change, err
		}
	}
	return nil, errPassword
}

func (r *run) changeWithPassword(ctx context.Context, f io.ReaderAt, size int64, password string) (change, error) {
	var drop []span
	have := make(map[fingerprint]bool)
	scan, err := scanJKS(readerOf(ctx, f), size-sha1.Size, password, r.mayBeKnown, func(e jksEntry) {
		wanted := e.certificate && r.isWanted(e.fingerprint)
		switch {
		case e.certificate && !wanted && (isOurAlias(e.alias) || r.isFormer(e.fingerprint)):
			drop = append(drop, e.span)
		case wanted:
			have[e.fingerprint] = true
		}
	})
	if err != nil {
		return nil, err
	}
	var missing [][]byte
	for _, c := range r.wanted {
		if !have[c.fingerprint] {
			missing = append(missing, jksEntryOf(c, scan.version, time.Now()))
		}
	}
	if len(drop) == 0 && len(missing) == 0 {
		return nil, nil //nolint:nilnil // no change
	}
	return func(w io.Writer) error {
		digest := jksDigest(password)
		both := io.MultiWriter(w, digest)
		header := binary.BigEndian.AppendUint32(nil, scan.magic)
		header = binary.BigEndian.AppendUint32(header, scan.version)
		header = binary.BigEndian.AppendUint32(header, uint32(scan.count-len(drop)+len(missing)))
		if err := writeAll(both, header); err != nil {
			return err
		}
		without := append([]span{{from: 0, to: headerJKS}}, drop...)
		if err := copyWithout(ctx, both, f, scan.size, without); err != nil {
			return err
		}
		if err := writeAll(both, missing...); err != nil {
			return err
		}
		return writeAll(w, digest.Sum(nil))
	}, nil
}

// jksEntryOf encodes a trusted certificate.
func jksEntryOf(c certificate, version uint32, at time.Time) []byte {
	entry := binary.BigEndian.AppendUint32(nil, tagCertificate)
	entry = appendText(entry, c.name)
	entry = binary.BigEndian.AppendUint64(entry, uint64(at.UnixMilli()))
	if version == 2 {
		entry = appendText(entry, typeX509)
	}
	entry = binary.BigEndian.AppendUint32(entry, uint32(len(c.der)))
	return append(entry, c.der...)
}

func appendText(to []byte, text string) []byte {
	return append(binary.BigEndian.AppendUint16(to, uint16(len(text))), text...)
}
