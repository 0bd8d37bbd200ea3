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
		return strings.Contains(with.run("cat", store), "sluice")
	})
	if strings.Contains(without.run("cat", store), "sluice") {
		b.Fatal("a container of a pod that has not opted in has the CA")
	}
	var added, plain []time.Duration
	for b.Loop() {
		added, plain = append(added, with.start()), append(plain, without.start())
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
	pid := strconv.Itoa(p.Processes()[0])
	return starter{b, []string{
		"nsenter", "--target", pid, "--mount", "--net", "--pid", "unshare", "--mount", "--pid", "--fork",
		"--root=" + root, "/bin/busybox",
	}}
}

// run runs a program of BusyBox in a container, and returns its output.
func (s starter) run(program ...string) string {
	s.b.Helper()
	args := append(slices.Clone(s.args), program...)
	out, err := exec.Command(args[0], args[1:]...).CombinedOutput()
	if err != nil {
		s.b.Fatalf("%q: %v\n%s", args, err, out)
	}
	return string(out)
}

// start is the time from the start of a container to its end.
func (s starter) start() time.Duration {
	s.b.Helper()
	begun := time.Now()
	s.run("true")
	return time.Since(begun)
}

// median is in milliseconds.
func median(times []time.Duration) float64 {
	slices.Sort(times)
	return float64(times[len(times)/2].Microseconds()) / 1000
}
