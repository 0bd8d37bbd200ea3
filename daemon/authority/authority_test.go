package authority

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha1"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"math/big"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

var epoch = time.Date(2026, 11, 22, 9, 0, 0, 0, time.UTC)

const (
	year = 365 * 24 * time.Hour
	week = 7 * 24 * time.Hour
)

func newRoot(t *testing.T, now time.Time, lifetime time.Duration, zones ...string) Authority {
	t.Helper()
	a, err := NewRoot(now, lifetime, zones)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

// issue makes an intermediate with a key of its own.
func issue(t *testing.T, a Authority, node string, now time.Time, lifetime time.Duration) Authority {
	t.Helper()
	key, err := NewKey()
	if err != nil {
		t.Fatal(err)
	}
	chain, err := a.Issue(node, key.Public(), now, lifetime)
	if err != nil {
		t.Fatal(err)
	}
	return Authority{chain, key}
}

// leaf signs a certificate as a proxy does: for names, with the key of its CA.
func leaf(t *testing.T, a Authority, now time.Time, change func(*x509.Certificate)) *x509.Certificate {
	t.Helper()
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "leaf"},
		NotBefore: now.Add(-48 * time.Hour), NotAfter: now.Add(year),
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	change(template)
	c, err := sign(template, a.Chain[0], a.Key.Public(), a.Key)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func named(names ...string) func(*x509.Certificate) {
	return func(c *x509.Certificate) {
		for _, name := range names {
			if ip := net.ParseIP(name); ip != nil {
				c.IPAddresses = append(c.IPAddresses, ip)
			} else {
				c.DNSNames = append(c.DNSNames, name)
			}
		}
	}
}

// verify verifies a certificate as a client does that trusts the root of a.
func verify(a Authority, c *x509.Certificate, now time.Time, usage x509.ExtKeyUsage, more ...*x509.Certificate) error {
	roots, others := x509.NewCertPool(), x509.NewCertPool()
	roots.AddCert(a.Root())
	for _, i := range append(a.Chain[:len(a.Chain)-1], more...) {
		others.AddCert(i)
	}
	_, err := c.Verify(x509.VerifyOptions{
		Roots: roots, Intermediates: others, CurrentTime: now, KeyUsages: []x509.ExtKeyUsage{usage},
	})
	return err
}

// openssl verifies with that program, where it is installed.
func openssl(t *testing.T, a Authority, c *x509.Certificate, now time.Time) (valid, installed bool) {
	t.Helper()
	program, err := exec.LookPath("openssl")
	if err != nil {
		return false, false
	}
	dir := t.TempDir()
	for name, chain := range map[string][]*x509.Certificate{
		"root": {a.Root()}, "chain": a.Chain[:len(a.Chain)-1], "leaf": {c},
	} {
		if err := os.WriteFile(filepath.Join(dir, name), EncodeCertificates(chain), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	cmd := exec.Command(program, "verify", "-x509_strict", "-purpose", "sslserver",
		"-attime", big.NewInt(now.Unix()).String(), "-CAfile", "root", "-untrusted", "chain", "leaf")
	cmd.Dir = dir
	out, err := cmd.CombinedOutput()
	t.Logf("openssl: %s", out)
	return err == nil, true
}

// TestChain: a client that trusts the root accepts the certificates that a proxy signs with its intermediate, and
// nothing else that can be made with the key.
func TestChain(t *testing.T) {
	t.Parallel()
	plain := issue(t, newRoot(t, epoch, 3*year), "node-1", epoch, week)
	zoned := issue(t, newRoot(t, epoch, 3*year, "example.com", "example.org"), "node-1", epoch, week)
	for _, tc := range []struct {
		name  string
		by    Authority
		names []string
		at    time.Time
		want  bool
	}{
		{"any name", plain, []string{"www.example.net"}, epoch, true},
		{"an address", plain, []string{"192.0.2.1", "2001:db8::1"}, epoch, true},
		{"a clock that is slow", plain, []string{"www.example.net"}, epoch.Add(-skew + time.Second), true},
		{"at the end of the intermediate", plain, []string{"www.example.net"}, epoch.Add(week - time.Second), true},
		{"after it", plain, []string{"www.example.net"}, epoch.Add(week + time.Second), false},
		{"the zone", zoned, []string{"example.com"}, epoch, true},
		{"names in both zones", zoned, []string{"a.b.example.com", "www.example.org"}, epoch, true},
		{"a name outside of them", zoned, []string{"www.example.net"}, epoch, false},
		{"one of two names outside", zoned, []string{"example.com", "www.example.net"}, epoch, false},
		{"a name that ends in the same way", zoned, []string{"notexample.com"}, epoch, false},
		{"a name in a zone, and an address", zoned, []string{"example.com", "192.0.2.1"}, epoch, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			c := leaf(t, tc.by, epoch, named(tc.names...))
			if err := verify(tc.by, c, tc.at, x509.ExtKeyUsageServerAuth); (err == nil) != tc.want {
				t.Errorf("Go accepts it: %v; want %t", err, tc.want)
			}
			if got, ok := openssl(t, tc.by, c, tc.at); ok && got != tc.want {
				t.Errorf("openssl accepts it: %t, want %t", got, tc.want)
			}
		})
	}
}

// TestConstraintsWithoutTheRoots: a client that ignores the constraints of a root, as Java does, meets them in the
// intermediate.
func TestConstraintsWithoutTheRoots(t *testing.T) {
	t.Parallel()
	i := issue(t, newRoot(t, epoch, year, "example.com"), "n", epoch, week).Chain[0]
	if len(i.PermittedDNSDomains) != 1 || i.PermittedDNSDomains[0] != "example.com" || !i.PermittedDNSDomainsCritical {
		t.Errorf("the intermediate permits %q, critical %t", i.PermittedDNSDomains, i.PermittedDNSDomainsCritical)
	}
}

// TestKeyIdentifier: the intermediate has the identifier that mitmproxy 10.1 to 11 write into certificates below it.
func TestKeyIdentifier(t *testing.T) {
	t.Parallel()
	i := issue(t, newRoot(t, epoch, year), "n", epoch, week)
	public, ok := i.Key.Public().(*ecdsa.PublicKey)
	if !ok {
		t.Fatalf("the key is a %T", i.Key)
	}
	point, err := public.Bytes()
	if err != nil {
		t.Fatal(err)
	}
	if want := sha1.Sum(point); !bytes.Equal(i.Chain[0].SubjectKeyId, want[:]) {
		t.Errorf("got %x, want %x", i.Chain[0].SubjectKeyId, want)
	}
}

// TestKeyOfAProxy: the key of an intermediate makes neither another CA nor a certificate for clients.
func TestKeyOfAProxy(t *testing.T) {
	t.Parallel()
	i := issue(t, newRoot(t, epoch, year), "n", epoch, week)
	ca := leaf(t, i, epoch, func(c *x509.Certificate) {
		c.IsCA, c.BasicConstraintsValid, c.KeyUsage = true, true, x509.KeyUsageCertSign
	})
	below := leaf(t, Authority{append([]*x509.Certificate{ca}, i.Chain...), i.Key}, epoch, named("a.example"))
	if err := verify(i, below, epoch, x509.ExtKeyUsageServerAuth, ca); err == nil {
		t.Error("a certificate below another CA is accepted")
	}
	user := leaf(t, i, epoch, func(c *x509.Certificate) {
		c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}
	})
	if err := verify(i, user, epoch, x509.ExtKeyUsageClientAuth); err == nil {
		t.Error("a certificate for a client is accepted")
	}
}

func TestSubjects(t *testing.T) {
	t.Parallel()
	a, b := newRoot(t, epoch, year), newRoot(t, epoch, year)
	if a.Root().Subject.String() == b.Root().Subject.String() {
		t.Errorf("two roots of one day have the name %s", a.Root().Subject)
	}
	long := issue(t, a, strings.Repeat("n", 253), epoch, week)
	name := long.Chain[0].Subject.CommonName
	if len(name) != maxCommonName || !strings.HasPrefix(name, "sluice proxy") {
		t.Errorf("the common name is %q, with %d characters", name, len(name))
	}
}

func TestIssueEndsWithTheRoot(t *testing.T) {
	t.Parallel()
	root := newRoot(t, epoch, 10*24*time.Hour)
	late := epoch.Add(5 * 24 * time.Hour)
	if got := issue(t, root, "n", late, week).Until(); !got.Equal(root.Until()) {
		t.Errorf("the intermediate ends at %s, the root at %s", got, root.Until())
	}
	key, err := NewKey()
	if err != nil {
		t.Fatal(err)
	}
	for _, at := range []time.Time{root.Until().Add(time.Second), epoch.Add(-2 * skew)} {
		if _, err := root.Issue("n", key.Public(), at, week); err == nil {
			t.Errorf("the root signs at %s, when it is not valid", at)
		}
	}
}

func TestRenewAt(t *testing.T) {
	t.Parallel()
	root := newRoot(t, epoch, year)
	if got, want := root.RenewAt(), epoch.Add(year/3); !got.Equal(want) {
		t.Errorf("a root: got %s, want %s", got, want)
	}
	if got, want := issue(t, root, "n", epoch, time.Minute).RenewAt(), epoch.Add(20*time.Second); !got.Equal(want) {
		t.Errorf("an intermediate for a minute: got %s, want %s", got, want)
	}
}

// corporate is an authority as a company's PKI makes it: an intermediate below a root, with RSA keys.
func corporate(t *testing.T, pathlen int) (a, root Authority) {
	t.Helper()
	certify := func(name string, pathlen int, parent *Authority) Authority {
		key, err := rsa.GenerateKey(rand.Reader, 2048)
		if err != nil {
			t.Fatal(err)
		}
		template := template(name, epoch, year)
		template.MaxPathLen, template.MaxPathLenZero = pathlen, pathlen == 0
		if parent == nil {
			parent = &Authority{[]*x509.Certificate{template}, key}
		}
		c, err := sign(template, parent.Chain[0], key.Public(), parent.Key)
		if err != nil {
			t.Fatal(err)
		}
		chain := []*x509.Certificate{c}
		if parent.Chain[0] != template {
			chain = append(chain, parent.Chain...)
		}
		return Authority{chain, key}
	}
	root = certify("Example Corp root", -1, nil)
	a = certify("Example Corp inspection", pathlen, &root)
	return a, root
}

func TestParse(t *testing.T) {
	t.Parallel()
	good, root := corporate(t, 1)
	short, _ := corporate(t, 0)
	other := newRoot(t, epoch, year)
	server := Authority{append([]*x509.Certificate{leaf(t, good, epoch, named("a"))}, good.Chain...), good.Key}
	pemOf := func(a Authority) (chain, key []byte) {
		key, err := EncodeKey(a.Key)
		if err != nil {
			t.Fatal(err)
		}
		return EncodeCertificates(a.Chain), key
	}
	for _, tc := range []struct {
		name string
		a    Authority
		want string // part of the error; empty: it can be read
	}{
		{"a root of ours", other, ""},
		{"an intermediate of a company", good, ""},
		{"a company's root", root, ""},
		{"no root at the end", Authority{good.Chain[:1], good.Key}, "is not a root"},
		{"the wrong root", Authority{append(good.Chain[:1:1], other.Root()), good.Key}, "is not signed by"},
		{"the key of another", Authority{good.Chain, other.Key}, "private key"},
		{"no room for an intermediate", short, "path length of 0"},
		{"the certificate of a server", server, "not one of a CA"},
	} {
		chain, key := pemOf(tc.a)
		a, err := Parse(chain, key)
		switch {
		case tc.want == "" && err != nil:
			t.Errorf("%s: %v", tc.name, err)
		case tc.want == "":
			i := issue(t, a, "n", epoch, week)
			c := leaf(t, i, epoch, named("a.example"))
			if err := verify(i, c, epoch, x509.ExtKeyUsageServerAuth); err != nil {
				t.Errorf("%s: %v", tc.name, err)
			}
		case err == nil || !strings.Contains(err.Error(), tc.want):
			t.Errorf("%s: got %v, want an error with %q", tc.name, err, tc.want)
		}
	}
	for name, text := range map[string][]byte{"nothing": nil, "rubbish": []byte("rubbish")} {
		if _, err := Parse(text, text); err == nil {
			t.Errorf("%s can be read", name)
		}
	}
}

func TestZones(t *testing.T) {
	t.Parallel()
	if err := Zones([]string{"example.com", "localhost", "a.b.example"}); err != nil {
		t.Error(err)
	}
	for _, zone := range []string{"", ".example.com", "*.example.com", "example.com.", "https://example.com", "a b"} {
		if Zones([]string{zone}) == nil {
			t.Errorf("%q is a zone", zone)
		}
	}
}

func TestFiles(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	root := newRoot(t, time.Now(), year)
	if err := root.CreateRoot(dir); err != nil {
		t.Fatal(err)
	}
	if err := newRoot(t, time.Now(), year).CreateRoot(dir); err == nil {
		t.Error("a second root can be made in the same folder")
	}
	read, err := ReadRoot(dir)
	if err != nil || !read.Root().Equal(root.Root()) {
		t.Fatalf("the root in the folder is %v, %v; want the first one", read, err)
	}
	for range 2 { // the second time it replaces the first
		i := issue(t, read, "n", time.Now(), week)
		if err := i.WriteMitmproxy(dir); err != nil {
			t.Fatal(err)
		}
		got, err := ReadMitmproxy(dir)
		if err != nil || !got.Chain[0].Equal(i.Chain[0]) || len(got.Chain) != 2 {
			t.Errorf("the intermediate in the folder: %v", err)
		}
	}
	path := filepath.Join(dir, mitmproxyCA)
	if _, err := tls.LoadX509KeyPair(path, path); err != nil {
		t.Errorf("a TLS server cannot load it: %v", err)
	}
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) != 4 {
		t.Errorf("the folder has %v, %v; want four files", entries, err)
	}
	for _, e := range entries {
		info, err := e.Info()
		secret := e.Name() == mitmproxyCA || e.Name() == rootKey
		if err != nil || secret != (info.Mode().Perm() == 0o600) {
			t.Errorf("%s has mode %s, %v", e.Name(), info.Mode(), err)
		}
	}
}

// TestCreateRootHalf: the rest of a root, of which only the key or the certificate is left, is not completed with
// another one's.
func TestCreateRootHalf(t *testing.T) {
	t.Parallel()
	for _, left := range []string{rootKey, rootCertificate} {
		dir := t.TempDir()
		if err := os.WriteFile(filepath.Join(dir, left), []byte("x"), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := newRoot(t, epoch, year).CreateRoot(dir); err == nil {
			t.Errorf("with %s alone a root can be made", left)
		}
		entries, err := os.ReadDir(dir)
		if err != nil || len(entries) != 1 {
			t.Errorf("beside %s there is %v, %v", left, entries, err)
		}
	}
}
