package endpoint

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/sluice-cni/sluice/daemon/captured"
	"github.com/sluice-cni/sluice/daemon/gate"
	"github.com/sluice-cni/sluice/daemon/sockdiag"
	"github.com/sluice-cni/sluice/daemon/socket"
	"github.com/sluice-cni/sluice/daemon/unixsock"
	"github.com/sluice-cni/sluice/integration/testbed"
	"github.com/sluice-cni/sluice/plugin/attach"
	"github.com/sluice-cni/sluice/plugin/ruleset"
)

func TestMain(m *testing.M) { os.Exit(testbed.Main(m)) }

// testTable is a table with acceptors that a test looks into.
type testTable struct {
	*Table
	// accepting makes the acceptors accept. Otherwise connections stay in the accept queues.
	accepting bool

	mu        sync.Mutex // guards acceptors
	acceptors map[attach.NetnsID]*acceptor
}

// newTable makes an empty table. At the end of the test its gates are closed.
func newTable(t *testing.T) *testTable {
	t.Helper()
	table := &testTable{acceptors: map[attach.NetnsID]*acceptor{}}
	table.Table = NewTable(func(s Served) Acceptor {
		a := &acceptor{
			Served: s, accepting: table.accepting, accepted: make(chan *socket.Conn, 10), ended: make(chan error, 10),
		}
		table.mu.Lock()
		defer table.mu.Unlock()
		table.acceptors[s.Netns] = a
		return a
	}, captured.Policy{}, slog.New(slog.DiscardHandler))
	t.Cleanup(func() {
		table.Release()
		table.End()
	})
	return table
}

// acceptor returns the acceptor of the endpoint e.
func (table *testTable) acceptor(e *Endpoint) *acceptor {
	table.mu.Lock()
	defer table.mu.Unlock()
	return table.acceptors[e.ID]
}

// acceptor is a fake: it accepts connections and leaves them to the test.
type acceptor struct {
	Served
	accepting bool
	accepted  chan *socket.Conn
	ended     chan error // receives the cause of the end of accepting, once for each call of Serve
}

// Serve implements Acceptor.
func (a *acceptor) Serve(ctx, accepting context.Context, g *gate.Gate) {
	var wg sync.WaitGroup
	if a.accepting {
		for _, l := range g.Listeners {
			wg.Go(func() { a.accept(ctx, accepting, l) })
		}
	}
	<-accepting.Done()
	a.ended <- context.Cause(accepting)
	wg.Wait()
}

func (a *acceptor) accept(ctx, accepting context.Context, l *gate.Listener) {
	for l.Wait() == nil && accepting.Err() == nil {
		if c, err := l.Accept(); c != nil {
			a.accepted <- c
		} else if err != nil {
			return
		}
	}
}

// Counts implements Acceptor.
func (a *acceptor) Counts() sockdiag.Counts { return sockdiag.Counts{} }

// receive returns the next value of c, or fails the test after 20 seconds.
func receive[T any](t *testing.T, c <-chan T) (v T) {
	t.Helper()
	select {
	case v = <-c:
	case <-time.After(20 * time.Second):
		t.Fatal("it never happened: a value on the channel")
	}
	return v
}

// outboundOnly is a ruleset without inbound ports.
func outboundOnly() ruleset.Ruleset { return ruleset.Provisional("eth0") }

// identify returns the identity of the netns of h.
func identify(t *testing.T, h *testbed.Host) attach.NetnsID {
	t.Helper()
	id, err := attach.IdentifyNetns(h.Path())
	if err != nil {
		t.Fatal(err)
	}
	return id
}

// record returns a record of an attachment of h with that state.
func record(t *testing.T, h *testbed.Host, state attach.State) attach.Record {
	t.Helper()
	return attach.Record{
		Attachment: attach.Attachment{
			ID: attach.ID{ContainerID: h.Name, IfName: "eth0"}, Netns: h.Path(),
			Pod: attach.Pod{Namespace: "ci", Name: "web-0"}, IPs: []netip.Addr{netip.MustParseAddr("198.51.100.2")},
		},
		NetnsID: identify(t, h), State: state,
	}
}

// capture attaches h as a captured pod with that policy, and returns its endpoint.
func (table *testTable) capture(t *testing.T, h *testbed.Host, late attach.Late) *Endpoint {
	t.Helper()
	r, rules := record(t, h, attach.Captured), outboundOnly()
	e := table.Enter(r.NetnsID)
	defer e.Leave()
	if err := e.Attach(r, attach.Decision{Capture: true, Ruleset: &rules, Late: late}); err != nil {
		t.Fatal(err)
	}
	return e
}

// dial connects to the outbound capture port of h.
func dial(t *testing.T, h *testbed.Host) *net.TCPConn {
	t.Helper()
	c, err := h.Dial(t.Context(), "tcp", "127.0.0.1:15001")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c.(*net.TCPConn)
}

// checkClosed checks that the outbound capture port of h refuses connections.
func checkClosed(t *testing.T, h *testbed.Host) {
	t.Helper()
	if c, err := h.Dial(t.Context(), "tcp", "127.0.0.1:15001"); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("dialling the capture port: got %v, %v; want it closed", c, err)
	}
}

// passed sends files over a unix socket, and returns the descriptors that another process would get.
func passed(t *testing.T, files []*os.File) []*os.File {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	var ends [2]*net.UnixConn
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "socketpair")
		c, err := net.FileConn(f)
		_ = f.Close() // c is a duplicate
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close() //nolint:errcheck // everything was received
		ends[i] = c.(*net.UnixConn)
	}
	if err := unixsock.Send(ends[0], []byte("x"), files); err != nil {
		t.Fatal(err)
	}
	_, received, err := unixsock.Receive(ends[1], make([]byte, 1))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unixsock.Close(received) })
	return received
}

// checkSame checks that got and want are the same sockets.
func checkSame(t *testing.T, got, want []*os.File) {
	t.Helper()
	g, err := gate.Cookies(got)
	if err != nil {
		t.Fatal(err)
	}
	w, err := gate.Cookies(want)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(w, g); diff != "" {
		t.Errorf("cookies of the listeners (-want +got):\n%s", diff)
	}
}

// isClosed reports whether every file is closed.
func isClosed(files []*os.File) bool {
	return !slices.ContainsFunc(files, func(f *os.File) bool {
		_, err := f.Stat()
		return !errors.Is(err, os.ErrClosed)
	})
}

// TestEnterExcludesOthersUntilLeave, also if Leave drops the endpoint for which others wait.
func TestEnterExcludesOthersUntilLeave(t *testing.T) {
	t.Parallel()
	id := attach.NetnsID{Dev: 4, Ino: 1, Cookie: 7}
	r := attach.Record{Attachment: attach.Attachment{ID: attach.ID{ContainerID: "4f2a", IfName: "eth0"}}, NetnsID: id}
	for name, keep := range map[string]bool{"with an attachment": true, "dropped by each Leave": false} {
		table := newTable(t)
		const goroutines, rounds = 8, 500
		count := 0 // not atomic: the race detector reports two goroutines in the endpoint
		var wg sync.WaitGroup
		for range goroutines {
			wg.Go(func() {
				for range rounds {
					e := table.Enter(id)
					before := count
					runtime.Gosched() // lets the others wait for this endpoint
					if count = before + 1; table.Get(id) != e {
						t.Errorf("%s: entered an endpoint that was dropped", name)
					}
					if keep {
						e.Add(r)
					}
					e.Leave()
				}
			})
		}
		wg.Wait()
		if count != goroutines*rounds {
			t.Errorf("%s: got %d entries counted, want %d", name, count, goroutines*rounds)
		}
		if got := table.Get(id) != nil; got != keep {
			t.Errorf("%s: endpoint in the table %t, want %t", name, got, keep)
		}
	}
}

// TestLeaveDropsAnEndpointWithoutAttachments, and shuts its gate for every process that holds the listeners.
func TestLeaveDropsAnEndpointWithoutAttachments(t *testing.T) {
	t.Parallel()
	h := testbed.NewHost(t, "pod")
	table := newTable(t)
	r := record(t, h, attach.Captured)
	e := table.Enter(r.NetnsID)
	if err := e.Open(r.Attachment, outboundOnly()); err != nil {
		t.Fatal(err)
	}
	passed(t, e.service.current().Files())
	e.Leave()
	if got := table.Get(r.NetnsID); got != nil {
		t.Errorf("got %v, want no endpoint", got)
	}
	checkClosed(t, h)
	if err := receive(t, table.acceptor(e).ended); !errors.Is(err, context.Canceled) {
		t.Errorf("cause of the end of accepting: got %v, want %v, because no process goes on", err, context.Canceled)
	}
}

// TestFindFollowsAnAttachment to another netns, also if the record of the former netns is removed later.
func TestFindFollowsAnAttachment(t *testing.T) {
	t.Parallel()
	before, after := testbed.NewHost(t, "before"), testbed.NewHost(t, "after")
	table := newTable(t)
	old := table.capture(t, before, attach.Late{})
	moved := record(t, before, attach.Captured)
	if got := table.Find(moved.ID); got != old {
		t.Errorf("before it moves: found %v, want %v", got, old)
	}
	moved.Netns, moved.NetnsID = after.Path(), identify(t, after)
	e := table.Enter(moved.NetnsID)
	defer e.Leave()
	e.Add(moved)
	former := table.Enter(old.ID)
	former.remove(moved.ID)
	former.Leave()
	if got := table.Find(moved.ID); got != e {
		t.Errorf("after it has moved: found %v, want %v", got, e)
	}
	checkClosed(t, before)
}

// TestOpenKeepsOpenListeners when the gate gets more of them, for inbound connections. All of them are served.
func TestOpenKeepsOpenListeners(t *testing.T) {
	t.Parallel()
	h := testbed.NewHost(t, "pod")
	table := newTable(t)
	table.accepting = true
	e := table.capture(t, h, attach.Late{})
	rules := outboundOnly()
	rules.InboundPorts = []ruleset.PortRange{{First: 80, Last: 80}}
	first := e.service.current().Files()
	e = table.Enter(e.ID)
	err := e.Open(record(t, h, attach.Captured).Attachment, rules)
	e.Leave()
	if err != nil {
		t.Fatal(err)
	}
	checkSame(t, e.service.current().Files()[:len(first)], first)
	if err := receive(t, table.acceptor(e).ended); !errors.Is(err, ErrHandedOver) {
		t.Errorf("cause of the end of accepting: got %v, want %v", err, ErrHandedOver)
	}
	dial(t, h)
	_ = receive(t, table.acceptor(e).accepted).Close()
	if got := len(e.service.current().Listeners); got != len(first)+1 {
		t.Errorf("got %d listeners, want %d", got, len(first)+1)
	}
}
