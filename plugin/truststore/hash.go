package truststore

import (
	"bytes"
	"crypto/sha1" //nolint:gosec // OpenSSL names files by SHA-1; nothing is secured by it
	"encoding/asn1"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"unicode/utf16"
)

// subjectHash is OpenSSL's X509_NAME_hash, by which it finds a CA in a directory: the first four bytes, little endian,
// of the SHA-1 of the name's canonical encoding. That encoding (x509_name_canon in crypto/x509/x_name.c) has the RDNs
// without the SEQUENCE around them, each string as UTF8String, in lower case, and with its white space collapsed.
func subjectHash(rawSubject []byte) (string, error) {
	var name asn1.RawValue
	if rest, err := asn1.Unmarshal(rawSubject, &name); err != nil {
		return "", fmt.Errorf("parsing the name: %w", err)
	} else if len(rest) > 0 {
		return "", errors.New("parsing the name: data after it")
	}
	digest := sha1.New() //nolint:gosec // as above
	for rdns := name.Bytes; len(rdns) > 0; {
		var rdn asn1.RawValue
		rest, err := asn1.Unmarshal(rdns, &rdn)
		if err != nil {
			return "", fmt.Errorf("parsing an RDN: %w", err)
		}
		rdns = rest
		canonical, err := canonicalRDN(rdn.Bytes)
		if err != nil {
			return "", err
		}
		digest.Write(canonical)
	}
	return fmt.Sprintf("%08x", binary.LittleEndian.Uint32(digest.Sum(nil))), nil
}

// canonicalRDN encodes the set of attributes of one RDN.
func canonicalRDN(attributes []byte) ([]byte, error) {
	var encoded [][]byte
	for len(attributes) > 0 {
		var attribute struct {
			Type  asn1.ObjectIdentifier
			Value asn1.RawValue
		}
		rest, err := asn1.Unmarshal(attributes, &attribute)
		if err != nil {
			return nil, fmt.Errorf("parsing an attribute: %w", err)
		}
		attributes = rest
		if text, ok := toUTF8(attribute.Value); ok {
			attribute.Value = asn1.RawValue{Tag: asn1.TagUTF8String, Bytes: canonicalText(text)}
		}
		one, err := asn1.Marshal(attribute)
		if err != nil {
			return nil, fmt.Errorf("encoding an attribute: %w", err)
		}
		encoded = append(encoded, one)
	}
	slices.SortFunc(encoded, bytes.Compare) // as DER sorts a SET OF
	return derValue(asn1.TagSet|constructed, bytes.Join(encoded, nil)), nil
}

// toUTF8 converts the string types that OpenSSL converts (ASN1_MASK_CANON) and that crypto/x509 accepts in a name.
func toUTF8(value asn1.RawValue) (text []byte, ok bool) {
	if value.Class != asn1.ClassUniversal {
		return nil, false
	}
	switch value.Tag {
	case asn1.TagUTF8String, asn1.TagPrintableString, asn1.TagIA5String:
		return value.Bytes, true
	case asn1.TagT61String: // OpenSSL takes it for Latin-1
		for _, b := range value.Bytes {
			text = append(text, string(rune(b))...)
		}
		return text, true
	case asn1.TagBMPString:
		if len(value.Bytes)%2 != 0 {
			return nil, false
		}
		for i := 0; i < len(value.Bytes); i += 2 {
			text = append(text, string(rune(binary.BigEndian.Uint16(value.Bytes[i:])))...)
		}
		return text, true
	}
	return nil, false
}

// canonicalText drops white space at the ends, collapses it to one space elsewhere, and lowers ASCII letters.
func canonicalText(text []byte) []byte {
	isSpace := func(r rune) bool { return r < 0x80 && bytes.ContainsRune([]byte(" \t\n\v\f\r"), r) }
	text = bytes.Join(bytes.FieldsFunc(text, isSpace), []byte(" "))
	for i, b := range text {
		if 'A' <= b && b <= 'Z' {
			text[i] = b + ('a' - 'A')
		}
	}
	return text
}

// constructed is the bit of a DER tag that says that values are inside.
const constructed = 0x20

// derValue encodes a tag of one byte, the length and the concatenated contents.
func derValue(tag byte, contents ...[]byte) []byte {
	length := 0
	for _, c := range contents {
		length += len(c)
	}
	value := derHeader(tag, length)
	for _, c := range contents {
		value = append(value, c...)
	}
	return value
}

// derHeader encodes a tag of one byte and a length.
func derHeader(tag byte, length int) []byte {
	if length < 0x80 {
		return []byte{tag, byte(length)}
	}
	var size [8]byte
	binary.BigEndian.PutUint64(size[:], uint64(length))
	digits := bytes.TrimLeft(size[:], "\x00")
	return append([]byte{tag, 0x80 | byte(len(digits))}, digits...)
}

// bmpString encodes text as UTF-16, big endian.
func bmpString(text string) []byte {
	var encoded []byte
	for _, unit := range utf16.Encode([]rune(text)) {
		encoded = binary.BigEndian.AppendUint16(encoded, unit)
	}
	return encoded
}
