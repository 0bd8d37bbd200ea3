package mitmproxy

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-cni/sluice/integration/testbed"
)

// scenario is a course of events with mitmproxy, in a scene of its own.
type scenario struct {
	name string
	run  func(t *testing.T, version, mode string) error
	mode string // the only one, unless empty
}

const manyName = "4,000 connections (connect: 3,000)"

// scenarios are the second half of the table.
var scenarios = append([]scenario{
	{"gRPC-like streams, stream_large_bodies=1m", streamsWithinLimit, ""},
	{"400 wait for the start", waitForTheStart, ""},
	{"restart under traffic", restart((*testbed.Program).Stop), ""},
	{"kill under traffic", restart((*testbed.Program).Kill), ""},
	{"two share a node (sockets)", twoShareANode, "sockets"},
	{"reload under traffic", reload, ""},
	{"saved flows", savedFlows, ""},
	{"inbound", inbound, ""},
	{manyName, manyConnections, ""},
}, trustScenarios...)

// trustScenarios are those about the trust in mitmproxy's CA.
var trustScenarios = []scenario{
	{"TLS passed through", passThrough, ""},
	{"clients refuse the certificate", learnRefusals, ""},
	{"TLS while sluiced is killed (sockets)", loseSluiced, "sockets"},
	{"CA changes under traffic", changeCA, ""},
	{"Python 3.13, intermediate CA", strictPython, ""},
}

// streamsWithinLimit streams bodies that mitmproxy holds back until they have ended or reach a limit.
func streamsWithinLimit(t *testing.T, version, mode string) error {
	s := newScene(t, version, mode)
	s.streamed = "1m"
	s.complete(t)
	return protocol{client: script{browse(exchangeFrames)}, server: web{echoFrames, true}}.run(t, s, firstPort)
}

func waitForTheStart(t *testing.T, version, mode string) error {
	s := newScene(t, version, mode)
	s.serveWeb(t)
	s.pod = s.node.AddPod("web")
	const count = 400
	outcome := make(chan error, count)
	for range count {
		go func() { outcome <- s.page(s.webClient()) }()
	}
	if err := soon("all wait", func() bool { return s.daemon.Waiting(s.pod) == count }); err != nil {
		return err
	}
	s.launch()
	var errs error
	for range count {
		errs = errors.Join(errs, <-outcome)
	}
	return errs
}

// traffic is workers that ask for pages without pause, each time on a new connection.
type traffic struct {
	served atomic.Int64
	mu     sync.Mutex
	failed []error
	stop   chan struct{}
	done   sync.WaitGroup
}

const workers = 8

// startTraffic starts workers that ask for pages by HTTP.
func startTraffic(s *scene) *traffic {
	return startTrafficOf(func() func() error {
		client := s.webClient()
		return func() error { return s.page(client) }
	})
}

// startTrafficOf starts workers, each with a request of its own that it repeats.
func startTrafficOf(newWorker func() func() error) *traffic {
	f := &traffic{stop: make(chan struct{})}
	for range workers {
		f.done.Go(func() {
			ask := newWorker()
			for {
				select {
				case <-f.stop:
					return
				default:
				}
				if err := ask(); err != nil {
					f.mu.Lock()
					f.failed = append(f.failed, err)
					f.mu.Unlock()
				} else {
					f.served.Add(1)
				}
			}
		})
	}
	return f
}

// flows waits until many more requests were served.
func (f *traffic) flows() error { return f.serves(10 * workers) }

// serves waits until count more requests were served.
func (f *traffic) serves(count int64) error {
	before := f.served.Load()
	return soon("requests are served", func() bool { return f.served.Load() >= before+count })
}

// end stops the workers. It returns an error if more than limit requests have failed, or one was refused.
func (f *traffic) end(limit int) error {
	close(f.stop)
	f.done.Wait()
	var errs error
	if len(f.failed) > limit {
		errs = fmt.Errorf("%d requests have failed, want %d at most: %w",
			len(f.failed), limit, errors.Join(f.failed...))
	}
	for _, err := range f.failed {
		if errors.Is(err, unix.ECONNREFUSED) || errors.Is(err, context.DeadlineExceeded) {
			errs = errors.Join(errs, err)
		}
	}
	return errs
}

// restart returns a scenario that ends the proxy and starts another. Requests in progress may fail, one of each worker.
func restart(end func(*testbed.Program)) func(t *testing.T, version, mode string) error {
	return func(t *testing.T, version, mode string) error {
		s := newScene(t, version, mode).complete(t)
		s.serveWeb(t)
		f := startTraffic(s)
		err := f.flows()
		end(s.proxy)
		s.launch()
		return errors.Join(err, f.flows(), f.end(workers))
	}
}

// twoShareANode ends one of two proxies under traffic.
func twoShareANode(t *testing.T, version, mode string) error {
	s := newScene(t, version, mode).complete(t)
	s.serveWeb(t)
	first := s.proxy
	s.launch()
	s.daemon.WaitForProxies(2, 1)
	f := startTraffic(s)
	served := func(p *testbed.Program) int { return strings.Count(p.Log(), "http from ") }
	err := soon("both serve", func() bool { return served(first) > 0 && served(s.proxy) > 0 })
	first.Kill()
	return errors.Join(err, f.flows(), f.end(workers))
}

// reload changes the addon's file under traffic. Nothing may fail, and every flow shows its pod.
func reload(t *testing.T, version, mode string) error {
	s := newScene(t, version, mode)
	code, err := os.ReadFile(s.addon)
	if err != nil {
		return err
	}
	s.addon = filepath.Join(s.node.Dir, "sluice.py")
	write := func() error { return os.WriteFile(s.addon, code, 0o600) }
	if err := write(); err != nil {
		return err
	}
	s.complete(t)
	s.serveWeb(t)
	alive := s.webClient()
	alive.Transport.(*http.Transport).DisableKeepAlives = false
	if err := s.page(alive); err != nil {
		return err
	}
	f := startTraffic(s)
	loads := func() int { return strings.Count(s.proxy.Log(), "Loading script "+s.addon) }
	before := loads()
	// The watcher compares times of modification, and may just have read the file.
	later := time.Now().Add(time.Minute)
	err = errors.Join(f.flows(), write(), os.Chtimes(s.addon, later, later))
	err = errors.Join(err, soon("mitmproxy loads the addon again", func() bool { return loads() > before }))
	err = errors.Join(err, f.flows(), f.end(0), s.page(alive))
	if err == nil && mode == "sockets" {
		err = soon("the proxy has the pod", func() bool {
			up := s.daemon.Status().Upstream
			return up.Ready && len(up.Proxies) == 1 && up.Proxies[0].Pods == 1
		})
	}
	if named, all := s.named(); named != all {
		err = errors.Join(err, fmt.Errorf("%d of %d flows show their pod", named, all))
	}
	return err
}

// savedFlows opens a file of flows without the addon.
func savedFlows(t *testing.T, version, mode string) error {
	s := newScene(t, version, mode)
	file := filepath.Join(s.node.Dir, "flows")
	s.args = append(s.args, "-w", file)
	s.complete(t)
	s.serveWeb(t)
	if err := s.page(s.webClient()); err != nil {
		return err
	}
	tcp := protocol{
		client: script{say("\x01 ask"), hear("\x01yes"), hearEnd},
		server: script{hear("\x01 ask"), say("\x01yes")},
	}
	if err := tcp.run(t, s, firstPort); err != nil {
		return err
	}
	ended := func() bool { return strings.Contains(s.proxy.Log(), "tcp from ") }
	if err := soon("the flow has ended", ended); err != nil {
		return err
	}
	s.proxy.Stop()
	out, err := s.node.TryExec(s.node.Mitmproxy("mitmdump"), "--no-server", "--rfile", file, "--showhost",
		"--set", "confdir="+testbed.Confdir(s.node))
	tcpFlow := "tcp -> " + net.JoinHostPort(testbed.WorldIPv4, strconv.Itoa(firstPort))
	for _, want := range []string{"http://" + site + "/plain", tcpFlow} {
		if !strings.Contains(out, want) {
			err = errors.Join(err, fmt.Errorf("the flow %q is missing", want))
		}
	}
	if err != nil {
		return fmt.Errorf("reading the saved flows: %w\n%s", err, out)
	}
	return nil
}

// inbound connects from the world to a port of the pod.
func inbound(t *testing.T, version, mode string) error {
	const port = "8080"
	s := newScene(t, version, mode)
	s.pod = testbed.Flavours[0].AddPod(t, s.node, "web",
		s.node.Annotated(map[string]string{"sluice.dev/capture-inbound-ports": port}))
	s.start(t)
	web{tellRequest, false}.serve(t.Context(), s.pod.Host, ":"+port, s.serverTLS)
	m := mitmCase{from: s.node.World}
	if err := s.page(m.client(net.JoinHostPort(s.pod.IPv4, port), nil)); err != nil {
		return err
	}
	return soon("the flow shows the pod and the direction", func() bool {
		return strings.Contains(s.proxy.Log(), " of default/web uid-web inbound")
	})
}

// many is held by the one test that has so many connections: the limit of descriptors may be too low for two.
var many sync.Mutex

// manyConnections opens connections, twice. The proxy closes all descriptors, and the second time takes no more memory.
func manyConnections(t *testing.T, version, mode string) error {
	many.Lock()
	defer many.Unlock()
	const limit = 20000
	count := 4000
	if mode == "connect" {
		count = 3000 // with the limit: sluiced takes six descriptors for a connection that it relays
	}
	s := newScene(t, version, mode).complete(t)
	address := net.JoinHostPort(testbed.WorldIPv4, testbed.EchoPort)
	script{hear("\x01 ask"), say("\x01yes"), hearEnd}.serve(t.Context(), s.node.World, address, nil)
	if err := unix.Prlimit(s.proxy.Pid(), unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: limit, Max: limit}, nil); err != nil {
		return fmt.Errorf("raising the proxy's limit of descriptors: %w", err)
	}
	before, memory := descriptors(t, s.proxy), make([]int, 2)
	for round := range memory {
		err := withOpen(s, address, count, func() {
			memory[round] = residentKiB(t, s.proxy)
			t.Logf("%s, %s: %d descriptors and %d KiB with %d connections", version, mode,
				descriptors(t, s.proxy), memory[round], count)
		})
		if err != nil {
			return err
		}
	}
	closed := func() bool { return descriptors(t, s.proxy) <= before+10 }
	err := soon("the proxy has as many descriptors as before", closed)
	t.Logf("%s, %s: %d descriptors before, %d after", version, mode, before, descriptors(t, s.proxy))
	if memory[1] > memory[0]*5/4 {
		err = errors.Join(err, fmt.Errorf("the first round took %d KiB, the second %d", memory[0], memory[1]))
	}
	return err
}

// withOpen opens connections to the echo service, some at a time, and calls do while all are open.
func withOpen(s *scene, address string, count int, do func()) error {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	conns := make([]net.Conn, count)
	defer func() {
		for _, c := range conns {
			if c != nil {
				_ = c.Close() // its echo was read
			}
		}
	}()
	next, errs := make(chan int), make(chan error, count)
	for range 8 * workers {
		go func() {
			for i := range next {
				c, err := s.pod.Open(ctx, address)
				if err == nil {
					conns[i] = c
					talk := &talk{Conn: c, tcp: c}
					err = script{say("\x01 ask"), hear("\x01yes")}.run(talk)
				}
				errs <- err
			}
		}()
	}
	for i := range count {
		next <- i
	}
	close(next)
	var all error
	for range count {
		all = errors.Join(all, <-errs)
	}
	if all == nil {
		do()
	}
	return all
}

// descriptors is the number of open descriptors of a program.
func descriptors(t *testing.T, p *testbed.Program) int {
	t.Helper()
	entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", p.Pid()))
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}

// residentKiB is the memory of a program.
func residentKiB(t *testing.T, p *testbed.Program) int {
	t.Helper()
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.Pid()))
	if err != nil {
		t.Fatal(err)
	}
	_, after, _ := strings.Cut(string(status), "VmRSS:")
	size, err := strconv.Atoi(strings.Fields(after)[0])
	if err != nil {
		t.Fatalf("the memory of %d: %v", p.Pid(), err)
	}
	return size
}
