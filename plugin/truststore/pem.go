package truststore

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"
)

// change writes the changed contents of a store. It is nil if the store is as it should be.
type change func(io.Writer) error

// span is a part of a file.
type span struct{ from, to int64 }

// pemBlock is a certificate in a bundle.
type pemBlock struct {
	span        // from the marker if there is one
	fingerprint fingerprint
	valid       bool // the base64 is of a length to look for, and could be decoded
	marked      bool
}

const (
	pemBegin = "-----BEGIN CERTIFICATE-----"
	pemEnd   = "-----END CERTIFICATE-----"
	// maxLine bounds the lines of a bundle. RFC 7468 has 64 columns; some tools write a certificate in one line.
	maxLine = 2 * maxCA
)

// pemScan is the outcome of reading a bundle.
type pemScan struct {
	size       int64
	endsInLine bool // without a newline at its end
}

// lineReaders are readers of bundles, each with a large buffer.
var lineReaders = sync.Pool{New: func() any { return bufio.NewReaderSize(nil, maxLine) }}

// scanPEM reads a bundle as a stream and calls visit for each of its certificates. Only those are decoded and hashed
// whose DER has a length that may be one of those to look for.
func scanPEM(r io.Reader, mayBe func(length int) bool, visit func(pemBlock)) (pemScan, error) {
	lines, _ := lineReaders.Get().(*bufio.Reader)
	lines.Reset(r)
	defer func() {
		lines.Reset(nil)
		lineReaders.Put(lines)
	}()
	var (
		scan   pemScan
		block  pemBlock
		text   []byte // the base64 of the block
		inside bool
		marked bool // the line before was the marker
		start  int64
	)
	for {
		line, err := lines.ReadSlice('\n')
		if err != nil && !errors.Is(err, io.EOF) {
			if errors.Is(err, bufio.ErrBufferFull) {
				err = fmt.Errorf("a line is longer than %d bytes", maxLine)
			}
			return scan, fmt.Errorf("reading the bundle at byte %d: %w", scan.size, err)
		}
		if len(line) > 0 {
			scan.endsInLine = line[len(line)-1] != '\n'
		}
		if bytes.IndexByte(line, 0) >= 0 {
			return scan, fmt.Errorf("reading the bundle at byte %d: not PEM", scan.size)
		}
		at := scan.size
		scan.size += int64(len(line))
		switch trimmed := bytes.TrimSpace(line); {
		case string(trimmed) == pemBegin:
			if !marked {
				start = at
			}
			block, text, inside = pemBlock{span: span{from: start}, marked: marked}, text[:0], true
			marked = false
		case string(trimmed) == pemEnd && inside:
			block.to, inside = scan.size, false
			if mayBe(derLength(text)) {
				block.fingerprint, block.valid = fingerprintOf(text)
			}
			visit(block)
		case inside && len(text)+len(trimmed) <= 2*maxCA:
			text = append(text, trimmed...)
		case inside: // longer than a certificate is
			return scan, fmt.Errorf("reading the bundle at byte %d: a certificate is longer than %d", start, maxCA)
		default:
			if marked = string(trimmed) == marker; marked {
				start = at
			}
		}
		if err != nil {
			if inside {
				return scan, fmt.Errorf("reading the bundle at byte %d: the last certificate has no end", start)
			}
			return scan, nil
		}
	}
}

// derLength is the length of the decoded bytes.
func derLength(text []byte) int {
	return len(bytes.TrimRight(text, "=")) * 6 / 8
}

// mayBeKnown reports whether a certificate of some length may be a wanted one, or a former one.
func (r *run) mayBeKnown(length int) bool {
	for _, l := range r.former {
		if l == length {
			return true
		}
	}
	return slices.ContainsFunc(r.wanted, func(c certificate) bool { return len(c.der) == length })
}

// isFormer reports whether a certificate is one that an earlier run made an anchor and that is not wanted any more.
func (r *run) isFormer(f fingerprint) bool {
	_, ok := r.former[f]
	return ok
}

// fingerprintOf decodes base64 in place and hashes the result.
func fingerprintOf(text []byte) (fingerprint, bool) {
	n, err := base64.StdEncoding.Decode(text, text)
	if err != nil {
		return fingerprint{}, false
	}
	return sha256.Sum256(text[:n]), true
}

// changeOfBundle compares a bundle with the wanted certificates.
func (r *run) changeOfBundle(ctx context.Context, f io.ReaderAt) (change, error) {
	var drop []span
	have := make(map[fingerprint]bool)
	scan, err := scanPEM(readerOf(ctx, f), r.mayBeKnown, func(b pemBlock) {
		wanted := b.valid && r.isWanted(b.fingerprint)
		switch {
		case b.marked && (!wanted || have[b.fingerprint]), b.valid && r.isFormer(b.fingerprint):
			drop = append(drop, b.span)
		case wanted:
			have[b.fingerprint] = true
		}
	})
	if err != nil {
		return nil, err
	}
	var missing [][]byte
	for _, c := range r.wanted {
		if !have[c.fingerprint] {
			missing = append(missing, c.pem)
		}
	}
	if len(drop) == 0 && len(missing) == 0 {
		return nil, nil //nolint:nilnil // no change
	}
	return func(w io.Writer) error {
		if err := copyWithout(ctx, w, f, scan.size, drop); err != nil {
			return err
		}
		if scan.endsInLine && len(missing) > 0 {
			if err := writeAll(w, []byte("\n")); err != nil {
				return err
			}
		}
		return writeAll(w, missing...)
	}, nil
}

// copyWithout copies the first size bytes of a file, without some spans.
func copyWithout(ctx context.Context, w io.Writer, f io.ReaderAt, size int64, without []span) error {
	at := int64(0)
	for _, s := range append(without, span{from: size, to: size}) {
		part := io.NewSectionReader(f, at, s.from-at)
		if n, err := io.Copy(w, contextReader{ctx: ctx, r: part}); err != nil {
			return fmt.Errorf("copying the store: %w", err)
		} else if n != s.from-at {
			return errors.New("copying the store: it has become shorter")
		}
		at = s.to
	}
	return nil
}

func writeAll(w io.Writer, parts ...[]byte) error {
	for _, p := range parts {
		if _, err := w.Write(p); err != nil {
			return fmt.Errorf("writing the certificates: %w", err)
		}
	}
	return nil
}

// contextReader reads until its context ends.
type contextReader struct {
	ctx context.Context
	r   io.Reader
}

// Read implements io.Reader.
func (c contextReader) Read(p []byte) (int, error) {
	if err := c.ctx.Err(); err != nil {
		return 0, err
	}
	return c.r.Read(p)
}

// readerOf reads a file from its start, up to the largest size of a store.
func readerOf(ctx context.Context, f io.ReaderAt) io.Reader {
	return contextReader{ctx: ctx, r: io.NewSectionReader(f, 0, maxStore)}
}
