package nested

import (
	"fmt"
	"regexp"
	"slices"
	"testing"
	"time"

	"github.com/sluice-cni/sluice/integration/clients"
)

// result is the outcome of one cell: a client in an image that is started in one way.
type result struct {
	client, image string
	way           way
	ok            bool
	output        string // of the client
}

func (r result) String() string {
	return fmt.Sprintf("%s in %s by %s", r.client, r.image, r.way)
}

// tryAll runs the clients of the images in some ways. Each client has to have an outcome, and no image that is built
// may have a trace of the proxy's CA.
func (l *lab) tryAll(t *testing.T, images []image, ways []way) (results []result) {
	t.Helper()
	s := newTraces(t, l.ProxyCA())
	for _, i := range images {
		l.publish(i)
		for number, w := range ways {
			begun := time.Now()
			built := fmt.Sprintf("built-%s-%d", i.repository, number)
			outcomes, err := l.try(w, i, built)
			if err != nil {
				t.Errorf("%s: %v", i.name, err)
				continue
			}
			var got, want []string
			for _, c := range i.clients {
				want = append(want, c.Name)
			}
			for _, o := range outcomes {
				got = append(got, o.Client)
				results = append(results, result{o.Client, i.name, w, o.OK, o.Output})
			}
			if !slices.Equal(got, want) {
				t.Errorf("%s by %s: got the outcomes of %q, want %q", i.name, w, got, want)
			}
			if w.program != dockerRun {
				for _, found := range l.inPushed(s, built) {
					t.Errorf("%s on top of %s: %s", w, i.name, found)
				}
			}
			t.Logf("%s in %s: %s", w, i.name, time.Since(begun).Round(time.Millisecond))
		}
		l.clear()
	}
	return results
}

// withoutBuildkitd are the ways that need a dockerd alone, without user namespaces.
func withoutBuildkitd() (some []way) {
	for _, w := range ways {
		if w.program != buildkitd && !w.remapped {
			some = append(some, w)
		}
	}
	return some
}

// refusal is the message of a client that does not trust a certificate.
var refusal = regexp.MustCompile(`(?i)certificate|x509|PKIX|UnknownIssuer|self[- _]signed|issuer`)

// wantRefused fails unless all clients refuse the certificate.
func wantRefused(t *testing.T, results []result) {
	t.Helper()
	for _, r := range results {
		if r.ok || !refusal.MatchString(r.output) {
			t.Errorf("%s: got %t, want it to refuse the certificate: %s", r, r.ok, r.output)
		}
	}
}

// TestWithoutCA: no client trusts the proxy's certificates in a container that has not been given the CA, however it is
// started. So a client that trusts them elsewhere has been given it.
func TestWithoutCA(t *testing.T) {
	annotations := inspect()
	annotations["sluice.dev/ca"] = "off"
	l := newLab(t, annotations)
	images := smallImages(t)
	results := l.tryAll(t, images, withoutBuildkitd())
	wantRefused(t, results)
	l.wantTrace(images[0])
	l.WaitLogged("certificate refused: default/runner to "+clients.Go.Label()+"-built-go-0.example.test", "nested")
}

// TestWithCA: all clients trust the proxy's certificates, from the first connection of each container on, and no image
// that is built has a trace of the CA.
func TestWithCA(t *testing.T) {
	l := newLab(t, inspect())
	for _, r := range l.tryAll(t, smallImages(t), withoutBuildkitd()) {
		if !r.ok {
			t.Errorf("%s: %s", r, r.output)
		}
	}
}

// wantTrace fails unless a trace is found in an image that has one in its layer.
func (l *lab) wantTrace(i image) {
	l.t.Helper()
	s := newTraces(l.t, l.ProxyCA())
	dockerfile := "# " + string(s.contents["the subject"]) + "\nFROM " + registryAddress + "/" + i.repository +
		"\nCOPY Dockerfile /copy\n"
	const name = "traced"
	if out, err := l.build(way{program: classic}, dockerfile, name); err != nil {
		l.t.Fatalf("%v\n%s", err, out)
	}
	if found := l.inPushed(s, name); !slices.Contains(found, "the subject is in copy") {
		l.t.Errorf("got the traces %q, want the subject in a file", found)
	}
}
