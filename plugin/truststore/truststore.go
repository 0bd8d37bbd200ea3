// Package truststore adds CA certificates to the trust stores of a container's root file system, so that the clients
// in the container trust the node's proxy. The image and the pod's spec stay as they are.
//
// # Stores
//
// There is no one store. OpenSSL reads a bundle or a directory whose file names are hashes of subjects, GnuTLS and Go
// read bundles, Python's requests and pip read the cacert.pem of certifi, Java reads its own keystore. Add looks for
// all of them (stores.go, certifi.go), and adds the certificates to each one that is there. It creates none but a link
// in an image without a bundle.
//
//	bundle     certificates in PEM, one after the other                      pem.go
//	directory  HASH.N -> certificate, as c_rehash and OpenSSL make it        directory.go, hash.go
//	certifi    a bundle that lies in a Python package                        certifi.go
//	java       cacerts as JKS or PKCS12, written without Java                jks.go, pkcs12.go
//	anchor     the folder that the distribution makes its stores from        anchor.go
//	named      a bundle or a directory that a variable of the image or the pod names, such as SSL_CERT_FILE
//
// An NSS database (cert9.db) is SQLite with attributes that only NSS understands, and is not written. Where p11-kit
// stands in for the NSS module with the roots, as in Fedora and RHEL, NSS reads the anchor.
//
// # How a store is changed
//
//   - The certificates are appended to a copy of the file, which then replaces it by rename, with its owner, mode and
//     extended attributes. A symbolic link stays: the file that it leads to is replaced.
//   - The anchor makes the container's own update-ca-certificates, update-ca-trust or package manager keep them.
//   - Where the place cannot be written (read-only root, immutable file), the changed copy is mounted over the store.
//     That is the second choice because a mount point breaks update-ca-certificates, which renames (EBUSY).
//   - A store on another mount than the root, such as a volume, is never written, because others may share it. The
//     changed copy is mounted over it.
//
// # The fallback
//
// An image without a store is served by environment variables, such as SSL_CERT_FILE, that name a file on a mount from
// the node: public roots and the CA. Programs that read no variables, such as wget, find it by a link at the place of
// Debian's bundle, if the image has no bundle at all.
//
// Those variables replace the roots of a client, so in an image that has a bundle they must lead to it, with the
// certificates that its user adds later. There a link to the bundle takes the place of the file (fallback.go).
//
// A line of comment before each certificate, a name or an alias marks the certificates that are ours (marker,
// namePrefix). A later run keeps those that are still wanted, and removes the others: that is how a CA is rotated.
// A container that already trusts the CA, from its image or from an earlier run, is not changed.
//
// # Hostile roots
//
// The container may have prepared its root. Every path is resolved by openat2 with RESOLVE_IN_ROOT and
// RESOLVE_NO_MAGICLINKS, so no link leads out (root.go). Only regular files of bounded size are opened, never a FIFO or
// a device, and none in /proc, /sys or the like. Files are streamed, so memory does not grow with them. The context
// bounds the time.
package truststore

import (
	"context"
	"crypto/sha256"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Kind is the kind of a trust store.
type Kind string

// The kinds of trust stores.
const (
	Bundle    Kind = "bundle"
	Directory Kind = "directory"
	Certifi   Kind = "certifi"
	Java      Kind = "java"
	Anchor    Kind = "anchor"
	// Fallback is the file that environment variables name (Options.Fallback).
	Fallback Kind = "fallback"
	// Named is a store that the container's own variables name (Options.Named).
	Named Kind = "named"
)

// Action is the act by which a store came to its certificates, or did not.
type Action string

// The actions.
const (
	Appended Action = "appended" // written into the container's own file or folder
	Bound    Action = "bound"    // a changed copy is mounted over the store
	Linked   Action = "linked"   // the fallback is a link to the container's own bundle
	Present  Action = "present"  // the store had them already
	Failed   Action = "failed"
)

// State says how far a container trusts the CA.
type State string

// The states.
const (
	// Trusted: every store that was found has the CA. Where there is none, the fallback has it: only clients that read
	// it, and clients with roots of their own, exist there.
	Trusted State = "trusted"
	// FilesOnly: a store does not have the CA. Clients that use another store, or the files which environment variables
	// name, trust the CA; others may not.
	FilesOnly State = "files-only"
	// Unknown: the stores were not all looked at, or there is neither a store nor a fallback.
	Unknown State = "unknown"
)

// Worst returns the worst of two states. What is none of the states counts as Unknown.
func Worst(a, b State) State {
	order := []State{Unknown, FilesOnly, Trusted}
	return order[max(min(slices.Index(order, a), slices.Index(order, b)), 0)]
}

// Store is the outcome for one trust store.
type Store struct {
	Path   string `json:"path"` // in the container; it may be a link to the store
	Kind   Kind   `json:"kind"`
	Action Action `json:"action"`
	// Changing is true for a store in a volume whose files kubelet exchanges, such as one of a ConfigMap. Its CA goes
	// with the next exchange.
	Changing bool   `json:"changing,omitempty"`
	Error    string `json:"error,omitempty"`
}

// Report is the outcome of Add.
type Report struct {
	State State `json:"state"`
	// CA are the fingerprints of the certificates that were to be added (see Fingerprints).
	CA     []string `json:"ca,omitempty"`
	Stores []Store  `json:"stores"`
	// Unsearched says why the search for certifi ended before it had seen all folders, if it did.
	Unsearched string `json:"unsearched,omitempty"`
	// Late is true if the container had been running, and may have connected, when it was given the CA. The caller of
	// Add sets it.
	Late bool `json:"late,omitempty"`
	// Error is the error that ended the run early.
	Error string `json:"error,omitempty"`
}

// Options are the optional parts of Add.
type Options struct {
	// Fallback is a file in the container, on a read-only mount, that environment variables such as SSL_CERT_FILE name:
	// public roots and the CA. If the container has a bundle of its own, a link to the bundle takes the place of the
	// file. The file must be the only one in its folder, which is mounted over.
	Fallback string
	// Named are paths of bundles and directories that the container's own environment variables name.
	Named []string
	// Enter, if it is not nil, moves the calling thread into the container's mount namespace, where mounts can be made.
	// It is called when the root is open. The thread ends with the work.
	Enter func() error
	// Bind, if it is not nil, makes Add mount over the stores and write nothing.
	Bind *Bind
}

// Add makes the trust stores of the file system at rootPath contain the certificates in caPEM, and no others that an
// earlier run added. Mounts are made in the mount namespace of the process.
//
// Add returns within half a second after ctx has ended, also if a file system in the container hangs: the goroutine
// that works is then left behind, so the caller should be a process of its own that ends.
func Add(ctx context.Context, rootPath string, caPEM []byte, options Options) Report {
	run := &run{options: options, report: Report{State: Unknown}}
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer run.recoverPanic()
		runtime.LockOSThread() // for ever: neither its mount namespace nor its working directory is the process's
		if err := run.add(ctx, rootPath, caPEM); err != nil {
			run.fail(err)
		}
	}()
	select {
	case <-done:
	case <-ctx.Done():
		run.fail(fmt.Errorf("adding to the trust stores: %w", context.Cause(ctx)))
		select {
		case <-done: // with no temporary file left behind
		case <-time.After(tidyTime):
		}
	}
	return run.result()
}

// tidyTime is how long a run may take to give up at the end of its context.
const tidyTime = 500 * time.Millisecond

// run is one call of Add.
type run struct {
	options Options
	root    *root
	wanted  []certificate
	// former are the fingerprints of certificates that an earlier run made anchors and that are not wanted any more.
	// The distribution's tools copy them into stores without the marker. The values are the lengths of their DER.
	former map[fingerprint]int

	mu     sync.Mutex // guards report: Add returns it while add may still run
	report Report
}

func (r *run) add(ctx context.Context, rootPath string, caPEM []byte) (err error) {
	if r.wanted, err = parseCA(caPEM); err != nil {
		return err
	}
	r.mu.Lock()
	r.report.CA = fingerprints(r.wanted)
	r.mu.Unlock()
	if r.root, err = openRoot(rootPath); err != nil {
		return err
	}
	defer r.root.close()
	r.root.bind = r.options.Bind
	if r.options.Enter != nil {
		if err := r.options.Enter(); err != nil {
			return err
		}
	}

	if r.options.Bind == nil {
		r.former = r.formerAnchors()
		r.addAnchors()
	}
	// Directories come first: a directory that cannot be written is mounted over, with the bundles that lie in it.
	if r.options.Bind == nil || !r.root.hasOne(opensslFiles) {
		for _, path := range directories {
			r.addDirectory(path)
		}
	}
	seen := make(map[location]bool)
	if r.options.Fallback != "" {
		r.markFallback(seen)
	}
	var own *place // the first bundle that has the CA
	for _, path := range bundles {
		p := r.addFile(ctx, path, Bundle, seen)
		if own == nil {
			own = p
		} else {
			p.close()
		}
	}
	for _, path := range r.options.Named {
		r.addNamed(ctx, path, seen)
	}
	for _, path := range r.root.expand(javaKeystores) {
		r.addFile(ctx, path, Java, seen).close()
	}
	certifi, unsearched := r.root.findCertifi(ctx)
	for _, path := range certifi {
		r.addFile(ctx, path, Certifi, seen).close()
	}
	if r.options.Fallback != "" {
		r.addFallback(ctx, own)
	}
	own.close()
	r.mu.Lock()
	r.report.Unsearched = unsearched
	r.mu.Unlock()
	return ctx.Err()
}

// addFile adds to the store in a file, and returns its place if the store has the CA then. A path without a file is no
// store; seen keeps a store with several paths from being reported twice.
func (r *run) addFile(ctx context.Context, path string, kind Kind, seen map[location]bool) *place {
	p, err := r.root.locate(path)
	if isAbsent(err) {
		return nil
	}
	var action Action
	changing := false
	if err == nil {
		changing = p.changing
		if seen[p.location] {
			p.close()
			return nil
		}
		seen[p.location] = true
		action, err = r.update(ctx, p, kind)
	}
	r.note(Store{Path: path, Kind: kind, Action: action, Changing: changing}, err)
	if err != nil {
		p.close()
		return nil
	}
	return p
}

// addNamed adds to a store that a variable names. A client fails, or uses other roots, where there is none: so it is an
// error here.
func (r *run) addNamed(ctx context.Context, path string, seen map[location]bool) {
	if !strings.HasPrefix(path, "/") {
		r.note(Store{Path: path, Kind: Named}, errors.New("the path is not absolute"))
		return
	}
	found, err := r.root.openat2(path, unix.O_PATH, 0)
	if err != nil {
		r.note(Store{Path: path, Kind: Named}, err)
		return
	}
	info, err := statFD(found)
	_ = found.Close() // only looked at
	switch {
	case err != nil:
		r.note(Store{Path: path, Kind: Named}, err)
	case info.Mode&unix.S_IFMT != unix.S_IFDIR:
		r.addFile(ctx, path, Named, seen).close()
	case !r.addDirectory(path):
		r.note(Store{Path: path, Kind: Named}, errors.New("the directory has no names that are hashes"))
	}
}

// update brings the store in a file up to date.
func (r *run) update(ctx context.Context, p *place, kind Kind) (Action, error) {
	f, err := r.root.openRegular(p)
	if err != nil {
		return Failed, err
	}
	defer func() { _ = f.Close() }() // only read
	info, err := f.Stat()
	if err != nil {
		return Failed, fmt.Errorf("looking at the store: %w", err)
	}
	var change change
	if kind == Java {
		change, err = r.changeOfKeystore(ctx, f, info.Size())
	} else {
		change, err = r.changeOfBundle(ctx, f)
	}
	if err != nil {
		return Failed, err
	}
	if change == nil {
		return Present, nil
	}
	return r.root.replace(p, f, change)
}

// note adds a store to the report. With an error it has failed.
func (r *run) note(store Store, err error) {
	if err != nil {
		store.Action, store.Error = Failed, err.Error()
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.report.Stores = append(r.report.Stores, store)
}

// fail notes the error that ends the run.
func (r *run) fail(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.report.Error == "" {
		r.report.Error = err.Error()
	}
}

// recoverPanic turns a panic into an error in the report. A hook that panics would keep the container from starting.
func (r *run) recoverPanic() {
	if cause := recover(); cause != nil {
		r.fail(fmt.Errorf("adding to the trust stores: panic: %v", cause))
	}
}

// result is the report so far, with its state.
func (r *run) result() Report {
	r.mu.Lock()
	defer r.mu.Unlock()
	report := r.report
	report.Stores = append([]Store{}, r.report.Stores...)
	report.State = report.state()
	return report
}

// state derives the state of the container. An anchor is no store that clients read.
func (r *Report) state() State {
	stores, failed, fallback := 0, 0, false
	for _, s := range r.Stores {
		switch s.Kind {
		case Anchor:
		case Fallback:
			fallback = s.Action != Failed
		default:
			stores++
			if s.Action == Failed {
				failed++
			}
		}
	}
	switch {
	case r.Error != "":
		return Unknown
	case failed == 0 && (stores > 0 || fallback):
		return Trusted
	case stores > failed || fallback:
		return FilesOnly
	default:
		return Unknown
	}
}

// fingerprint is the SHA-256 of a certificate's DER.
type fingerprint [sha256.Size]byte

// namePrefix begins the names of our files and aliases.
const namePrefix = "sluice-ca-"

// marker is the line before each certificate of ours in PEM.
const marker = "# Added by sluice (sluice.dev): the CA of the node's proxy"

// certificate is a CA certificate to be added.
type certificate struct {
	der         []byte
	fingerprint fingerprint
	hash        string // OpenSSL's hash of the subject
	name        string // of the file or the alias
	pem         []byte // with the marker
}

const (
	// maxCA and maxCAs bound the certificates to be added.
	maxCA  = 64 << 10
	maxCAs = 16
)

// parseCA reads the certificates to be added. Other PEM blocks, such as keys, are an error: they do not belong into a
// file that a container may see.
func parseCA(data []byte) ([]certificate, error) {
	var found []certificate
	for {
		block, rest := pem.Decode(data)
		if block == nil {
			break
		}
		data = rest
		if block.Type != "CERTIFICATE" {
			return nil, fmt.Errorf("reading the CA: a PEM block of type %q where only certificates belong", block.Type)
		}
		c, err := newCertificate(block.Bytes)
		if err != nil {
			return nil, fmt.Errorf("reading the CA: %w", err)
		}
		found = append(found, c)
	}
	if len(found) == 0 {
		return nil, errors.New("reading the CA: no certificate in PEM")
	}
	if len(found) > maxCAs {
		return nil, fmt.Errorf("reading the CA: %d certificates, more than %d", len(found), maxCAs)
	}
	return unique(found), nil
}

func newCertificate(der []byte) (certificate, error) {
	if len(der) > maxCA {
		return certificate{}, fmt.Errorf("a certificate of %d bytes, more than %d", len(der), maxCA)
	}
	parsed, err := x509.ParseCertificate(der)
	if err != nil {
		return certificate{}, fmt.Errorf("parsing a certificate: %w", err)
	}
	if !parsed.IsCA {
		return certificate{}, fmt.Errorf("the certificate of %q is not one of a CA", parsed.Subject)
	}
	hash, err := subjectHash(parsed.RawSubject)
	if err != nil {
		return certificate{}, fmt.Errorf("hashing the subject %q: %w", parsed.Subject, err)
	}
	sum := fingerprint(sha256.Sum256(der))
	text := append([]byte(marker+"\n"), pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})...)
	name := fmt.Sprintf("%s%x", namePrefix, sum[:6])
	return certificate{der: der, fingerprint: sum, hash: hash, name: name, pem: text}, nil
}

// unique drops certificates that are there twice.
func unique(certificates []certificate) []certificate {
	seen := make(map[fingerprint]bool)
	var kept []certificate
	for _, c := range certificates {
		if !seen[c.fingerprint] {
			seen[c.fingerprint] = true
			kept = append(kept, c)
		}
	}
	return kept
}

// isWanted reports whether a certificate is one of those to be added.
func (r *run) isWanted(f fingerprint) bool {
	return slices.ContainsFunc(r.wanted, func(c certificate) bool { return c.fingerprint == f })
}

// Fingerprints returns the fingerprints of the certificates in caPEM: the SHA-256 of each, as hexadecimal digits,
// sorted. The error is that of Add with the same certificates.
func Fingerprints(caPEM []byte) ([]string, error) {
	certificates, err := parseCA(caPEM)
	return fingerprints(certificates), err
}

func fingerprints(certificates []certificate) []string {
	var found []string
	for _, c := range certificates {
		found = append(found, fmt.Sprintf("%x", c.fingerprint))
	}
	slices.SortFunc(found, strings.Compare)
	return found
}

// certificateIn returns the one certificate in a file of ours.
func certificateIn(data []byte) (certificate, error) {
	block, _ := pem.Decode(data)
	if block == nil {
		return certificate{}, errors.New("no certificate in PEM")
	}
	return newCertificate(block.Bytes)
}
