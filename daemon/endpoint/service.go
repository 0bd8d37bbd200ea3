package endpoint

import (
	"context"
	"errors"
	"os"
	"sync"
	"sync/atomic"

	"github.com/sluice-cni/sluice/daemon/direct"
	"github.com/sluice-cni/sluice/daemon/gate"
	"github.com/sluice-cni/sluice/daemon/late"
	"github.com/sluice-cni/sluice/daemon/splice"
	"github.com/sluice-cni/sluice/plugin/attach"
)

// service has one endpoint's gate served by an acceptor.
type service struct {
	table    *Table
	id       attach.NetnsID
	records  func() []attach.Record
	accepted late.Accepted // connections that wait for the upstream's answer
	joined   splice.Set    // connections that are carried in this process
	over     atomic.Int64  // connections in the accept queues that the app had given up at the last tick

	mu       sync.Mutex      // guards the fields below
	gate     *gate.Gate      // nil if not captured, or if the gate could not be opened
	acceptor Acceptor        // nil until the first gate
	direct   *direct.Carrier // nil until the first gate
	ctx      context.Context // of the connections that came through the gate
	pod      string          // its name, for logs; empty until the first gate

	resetConnections context.CancelFunc
	stopAccepting    context.CancelCauseFunc
}

// current returns the gate, or nil.
func (s *service) current() *gate.Gate {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.gate
}

// serve begins to accept at g, which replaces the current gate, if any. The connections of that go on. The first call
// makes the acceptor, for the pod of at.
func (s *service) serve(at attach.Attachment, g *gate.Gate) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.acceptor == nil {
		s.pod = at.Pod.String()
		s.direct = direct.NewCarrier(&s.joined, s.table.policy, s.table.log.With("pod", s.pod))
		s.acceptor = s.table.accept(Served{
			Netns: s.id, Pod: at.Pod, IPs: at.IPs, Records: s.records,
			Policy: s.table.policy, Accepted: &s.accepted, Joined: &s.joined, Direct: s.direct,
		})
	}
	return s.serveLocked(g)
}

func (s *service) serveLocked(g *gate.Gate) error {
	if s.gate != nil {
		s.stopAccepting(ErrHandedOver)
		if err := errors.Join(g.Pause(), g.Resume()); err != nil { // ends accepting at the listeners that both have
			return err
		}
	}
	if s.ctx == nil {
		s.ctx, s.resetConnections = context.WithCancel(context.Background())
	}
	s.gate = g
	accepting, stop := context.WithCancelCause(s.ctx)
	s.stopAccepting = stop
	ctx, acceptor := s.ctx, s.acceptor
	s.table.serving.Go(func() { acceptor.Serve(ctx, accepting, g) })
	return nil
}

// narrow closes the inbound listeners, unless connections wait in them.
func (s *service) narrow() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.gate == nil {
		return nil
	}
	narrow, err := s.gate.Narrow()
	if narrow != s.gate {
		err = errors.Join(err, s.serveLocked(narrow))
	}
	return err
}

// pause stops accepting, and returns the listeners, or nil without a gate.
func (s *service) pause() ([]*os.File, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.gate == nil {
		return nil, nil
	}
	s.stopAccepting(ErrHandedOver)
	return s.gate.Files(), s.gate.Pause()
}

// resume undoes pause.
func (s *service) resume() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.gate == nil {
		return nil
	}
	return s.serveLocked(s.gate)
}

// release closes this process's listeners.
func (s *service) release() {
	s.mu.Lock()
	g, pod := s.gate, s.pod
	s.gate = nil
	if s.stopAccepting != nil {
		s.stopAccepting(ErrHandedOver)
	}
	s.mu.Unlock()
	if g == nil {
		return
	}
	if err := g.Close(); err != nil {
		s.table.log.Error("closing a gate failed", "pod", pod, "netnsID", s.id.String(), "err", err)
	}
}

// end resets the connections that came through the gate.
func (s *service) end() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ctx != nil {
		s.resetConnections()
		s.ctx = nil
	}
}

// sweep counts the connections in the accept queues of g that the app has given up. g may be nil.
func (s *service) sweep(g *gate.Gate) {
	over := 0
	if g != nil {
		var err error
		if over, err = g.Sweep(); err != nil && !errors.Is(err, os.ErrClosed) {
			s.table.log.Debug("looking for connections that were given up failed", "netnsID", s.id.String(), "err", err)
			return
		}
	}
	s.over.Store(int64(over))
}

// connections returns the context of the connections that came through the gate, or nil, the carrier of those that go
// direct, and the pod's name for logs.
func (s *service) connections() (ctx context.Context, carrier *direct.Carrier, pod string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.ctx, s.direct, s.pod
}
