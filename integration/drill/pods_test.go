package drill

import (
	"context"
	"net"
	"sync"
	"time"

	"github.com/sluice-cni/sluice/integration/testbed"
)

// attack calls act in so many loops at the same time until endAttack.
func (s *drillScene) attack(loops int, act func(ctx context.Context)) {
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	for range loops {
		running.Go(func() {
			for ctx.Err() == nil {
				act(ctx)
			}
		})
	}
	s.stopAttack = func() {
		cancel()
		running.Wait()
	}
	s.t.Cleanup(s.stopAttack) // of a test that has failed
}

func (s *drillScene) endAttack() { s.stopAttack() }

// deadPort drops SYNs.
const deadPort = "9"

// hostilePods are the faults that a captured pod can make. The other pods do not notice.
func hostilePods() []fault {
	var faults []fault
	for _, c := range []struct {
		name    string
		loops   int
		lasting time.Duration
		act     func(*drillScene, context.Context)
	}{
		{"dead destinations", 200, 5 * time.Second, func(s *drillScene, ctx context.Context) {
			s.holdFor(ctx, 1500*time.Millisecond, net.JoinHostPort(testbed.WorldIPv4, deadPort))
		}},
		{"connections that never send", 200, 0, func(s *drillScene, ctx context.Context) {
			s.holdFor(ctx, time.Minute, testbed.EchoAddresses[0])
		}},
		{"connections that never read", 40, 0, (*drillScene).neverRead},
		{"resets", 4, 0, (*drillScene).resetEach},
		{"capture ports", 20, 0, (*drillScene).knock},
	} {
		faults = append(faults, fault{
			name:   "pod: " + c.name,
			strike: func(s *drillScene) { s.attack(c.loops, func(ctx context.Context) { c.act(s, ctx) }) },
			undo:   (*drillScene).endAttack, lasting: c.lasting,
		})
	}
	return faults
}

// holdFor connects from the hostile pod, and sends nothing until the connection or its time ends.
func (s *drillScene) holdFor(ctx context.Context, limit time.Duration, address string) {
	c, err := s.hostile.Dial(ctx, "tcp", address)
	if err != nil {
		return // ctx has ended
	}
	defer c.Close() //nolint:errcheck // nothing was written
	_ = c.SetReadDeadline(time.Now().Add(limit))
	defer context.AfterFunc(ctx, func() { _ = c.SetReadDeadline(time.Unix(1, 0)) })()
	_, _ = c.Read(make([]byte, 1)) // ends at the deadline, or with a reset
}

// neverRead sends to an echo as much as all buffers on the way hold, and reads nothing.
func (s *drillScene) neverRead(ctx context.Context) {
	c, err := s.hostile.Dial(ctx, "tcp", testbed.EchoAddresses[0])
	if err != nil {
		return // ctx has ended
	}
	defer c.Close() //nolint:errcheck // all bytes may be lost
	_ = c.SetWriteDeadline(time.Now().Add(time.Minute))
	defer context.AfterFunc(ctx, func() { _ = c.SetWriteDeadline(time.Unix(1, 0)) })()
	for err == nil {
		_, err = c.Write(make([]byte, 64<<10)) // ends at the deadline, or with a reset
	}
}

// resetEach resets connections at once, after a request, and in the middle of an answer.
func (s *drillScene) resetEach(ctx context.Context) {
	for stage := range 3 {
		c, err := s.hostile.Dial(ctx, "tcp", testbed.EchoAddresses[stage%2])
		if err != nil {
			return // ctx has ended
		}
		if stage > 0 {
			_, _ = c.Write(make([]byte, 16<<10)) // it will be reset
		}
		if stage > 1 {
			_ = c.SetReadDeadline(time.Now().Add(time.Second))
			_, _ = c.Read(make([]byte, 1)) // the same
		}
		reset(c.(*net.TCPConn))
	}
}

// knock connects to the capture ports of the hostile pod and of another, and listens there. No connection is made to
// the pod's own.
func (s *drillScene) knock(ctx context.Context) {
	for _, port := range []string{"15001", "15006"} {
		for _, ip := range []string{"127.0.0.1", "::1", s.hostile.IPv4, s.hostile.IPv6} {
			try, cancel := context.WithTimeout(ctx, 100*time.Millisecond)
			c, err := s.hostile.Dial(try, "tcp", net.JoinHostPort(ip, port))
			cancel()
			if err == nil {
				_ = c.Close() // nothing was written
				s.t.Errorf("a connection to %s, port %s was accepted", ip, port)
			}
		}
		for _, ip := range []string{s.pods[0].IPv4, s.pods[0].IPv6} {
			s.holdFor(ctx, 100*time.Millisecond, net.JoinHostPort(ip, port))
		}
		err := s.hostile.Do(func() error {
			l, err := net.Listen("tcp", ":"+port)
			if err == nil {
				err = l.Close()
			}
			return err
		})
		if err == nil && port == "15001" {
			s.t.Errorf("the pod can listen on port %s beside the daemon", port)
		}
	}
}
