package nested

import (
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/sluice-cni/sluice/integration/clients"
	"github.com/sluice-cni/sluice/integration/runner"
	"github.com/sluice-cni/sluice/integration/testbed"
)

// TestBusyMachine: the first program of each of 100 containers of Docker has the CA, four at a time, on a machine that
// has no time: `make nested-table`.
func TestBusyMachine(t *testing.T) {
	if *tableFile == "" {
		t.Skip("it is for `make nested-table`")
	}
	l := newLab(t, inspect())
	i := busyboxImage(t)
	l.publish(i)
	name := registryAddress + "/" + i.repository
	l.mustRun(l.docker.Command("pull", "--quiet", name))
	testbed.KeepBusy(t, 4*runtime.NumCPU())
	const starts = 100
	var early atomic.Int32
	var group errgroup.Group
	group.SetLimit(4)
	for range starts {
		group.Go(func() error {
			out, err := run(l.docker.Command("run", "--rm", name, "/bin/cat", store))
			if err != nil {
				return fmt.Errorf("%w: %s", err, out)
			}
			if strings.Contains(out, addedBySluice) {
				early.Add(1)
			}
			return nil
		})
	}
	if err := group.Wait(); err != nil {
		t.Error(err)
	}
	t.Logf("the first program has the CA in %d of %d containers", early.Load(), starts)
	if early.Load() != starts {
		t.Error("a container has started without the CA")
	}
}

// addedBySluice is in each store that has the CA.
const addedBySluice = "Added by sluice"

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
	report(b, "", plain, added)
}

// BenchmarkConnect compares the connections of such containers: the first one of each, and ten later ones.
func BenchmarkConnect(b *testing.B) {
	s := runner.New(b, http.HandlerFunc(clients.Serve))
	with := newStarter(b, s, "with", map[string]string{"sluice.dev/nested": "inspect"})
	without := newStarter(b, s, "without", nil)
	first, later := map[string][]time.Duration{}, map[string][]time.Duration{}
	for b.Loop() {
		for name, s := range map[string]starter{"with": with, "without": without} {
			took := s.connect(11)
			first[name], later[name] = append(first[name], took[0]), append(later[name], took[1:]...)
		}
	}
	report(b, "-first", first["without"], first["with"])
	report(b, "-later", later["without"], later["with"])
}

// report reports medians in milliseconds, with a part of their names.
func report(b *testing.B, part string, without, with []time.Duration) {
	b.Helper()
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(median(without), "ms-without"+part)
	b.ReportMetric(median(with), "ms-with"+part)
	b.ReportMetric(median(with)-median(without), "ms-more"+part)
}

// starter starts containers as runc does, but without its own work: with a root, a mount namespace and a PID namespace.
type starter struct {
	b    *testing.B
	args []string // before those of the container's program
}

func newStarter(b *testing.B, s *runner.Scene, name string, annotations map[string]string) starter {
	b.Helper()
	p := s.AddPod(name, annotations)
	s.StartDocker(p)
	root := filepath.Join(p.DockerDir(), "root")
	try := testbed.Static(b, "./integration/clients/try")
	for from, to := range map[string]string{"/bin/busybox": "bin/busybox", store: store, try: clients.GoFile} {
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
	return starter{b, append(enter, "unshare", "--mount", "--pid", "--fork", "--root="+root)}
}

// start starts a container whose program prints the store. It returns the time to its end, and whether it has seen the
// CA.
func (s starter) start() (took time.Duration, hasCA bool) {
	s.b.Helper()
	begun := time.Now()
	out := s.run("/bin/busybox", "cat", store)
	return time.Since(begun), strings.Contains(out, addedBySluice)
}

// connect connects in a new container.
func (s starter) connect(times int) (took []time.Duration) {
	s.b.Helper()
	address := net.JoinHostPort(testbed.WorldIPv4, "443")
	out := s.run(clients.GoFile, clients.ConnectCommand, address, strconv.Itoa(times))
	for line := range strings.Lines(out) {
		t, err := time.ParseDuration(strings.TrimSpace(line) + "µs")
		if err != nil {
			s.b.Fatal(err)
		}
		took = append(took, t)
	}
	return took
}

// run runs a program in a new container.
func (s starter) run(program ...string) string {
	s.b.Helper()
	args := slices.Concat(s.args, program)
	out, err := exec.Command(args[0], args[1:]...).CombinedOutput()
	if err != nil {
		s.b.Fatalf("%q: %v\n%s", args, err, out)
	}
	return string(out)
}

// median is in milliseconds.
func median(times []time.Duration) float64 {
	slices.Sort(times)
	return float64(times[len(times)/2].Microseconds()) / 1000
}
