package nested

import (
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/sluice-cni/sluice/integration/clients"
	"github.com/sluice-cni/sluice/integration/runner"
	"github.com/sluice-cni/sluice/integration/testbed"
)

// BenchmarkStart compares the start of a nested container in a pod that has opted in with that in one that has not. The
// starts alternate. The store is that of this machine.
func BenchmarkStart(b *testing.B) {
	s := runner.New(b, http.HandlerFunc(clients.Serve))
	with := newStarter(b, s, "with", map[string]string{"sluice.dev/nested": "inspect"})
	without := newStarter(b, s, "without", nil)
	testbed.Eventually(b, "a nested container has the CA", func() bool {
		_, hasCA := with.start()
		return hasCA
	})
	var added, plain []time.Duration
	for b.Loop() {
		took, hasCA := with.start()
		added = append(added, took)
		if !hasCA {
			b.Error("the first program of a container has not seen the CA")
		}
		took, hasCA = without.start()
		plain = append(plain, took)
		if hasCA {
			b.Error("a container of a pod that has not opted in has the CA")
		}
	}
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(median(plain), "ms-without")
	b.ReportMetric(median(added), "ms-with")
	b.ReportMetric(median(added)-median(plain), "ms-more")
}

// starter starts containers as runc does, but without its own work: with a root, a mount namespace and a PID namespace.
type starter struct {
	b    *testing.B
	args []string
}

func newStarter(b *testing.B, s *runner.Scene, name string, annotations map[string]string) starter {
	b.Helper()
	p := s.AddPod(name, annotations)
	s.StartDocker(p)
	root := filepath.Join(p.DockerDir(), "root")
	for from, to := range map[string]string{"/bin/busybox": "bin/busybox", store: store} {
		content, err := os.ReadFile(from)
		if err == nil {
			err = os.MkdirAll(filepath.Dir(filepath.Join(root, to)), 0o755)
		}
		if err == nil {
			err = os.WriteFile(filepath.Join(root, to), content, 0o755)
		}
		if err != nil {
			b.Fatal(err)
		}
	}
	enter := []string{"nsenter", "--target", strconv.Itoa(p.Processes()[0]), "--mount", "--net", "--pid"}
	mount := append(slices.Clone(enter), "mount", "--bind", root, root) // as runc has the root of a container
	if out, err := exec.Command(mount[0], mount[1:]...).CombinedOutput(); err != nil {
		b.Fatalf("%q: %v\n%s", mount, err, out)
	}
	return starter{b, append(enter, "unshare", "--mount", "--pid", "--fork", "--root="+root,
		"/bin/busybox", "cat", store)}
}

// start starts a container whose program prints the store. It returns the time to its end, and whether it has seen the
// CA.
func (s starter) start() (took time.Duration, hasCA bool) {
	s.b.Helper()
	begun := time.Now()
	out, err := exec.Command(s.args[0], s.args[1:]...).CombinedOutput()
	took = time.Since(begun)
	if err != nil {
		s.b.Fatalf("%q: %v\n%s", s.args, err, out)
	}
	return took, strings.Contains(string(out), "Added by sluice")
}

// median is in milliseconds.
func median(times []time.Duration) float64 {
	slices.Sort(times)
	return float64(times[len(times)/2].Microseconds()) / 1000
}
