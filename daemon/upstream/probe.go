package upstream

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"time"
)

const (
	// probeTimeout bounds one probe.
	probeTimeout = 5 * time.Second
	// probeRetry is the longest time between a probe that failed and the next one.
	probeRetry = time.Second
)

// keepProbing decides by probes whether the upstream is there, until ctx ends. A dial alone does not tell: the kernel
// accepts connections for a process that hangs.
func (u *Upstream) keepProbing(ctx context.Context) {
	for timeouts := 0; ctx.Err() == nil; {
		next := u.every
		err := u.probe(ctx)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			timeouts++
		} else {
			timeouts = 0
		}
		switch {
		case ctx.Err() != nil:
		case err == nil:
			u.markReady()
		case isLocalExhaustion(err):
			u.log.Warn("upstream cannot be probed: this node lacks file descriptors, ports or memory",
				"upstream", u.name, "err", err)
		case timeouts == 1:
			next = 0 // the whole node may have been suspended: probe again at once
		default:
			u.markLate(err)
			next = min(next, probeRetry)
		}
		select {
		case <-u.dialed:
		case <-time.After(next):
		case <-ctx.Done():
		}
	}
}

// probe asks the upstream for a connection of the daemon's own. An upstream that answers at all serves.
func (u *Upstream) probe(ctx context.Context) error {
	err := u.askForOwn(ctx)
	if errors.Is(err, ErrUnreachable) || errors.Is(err, ErrMisconfigured) {
		return nil
	}
	return err
}

// askForOwn asks the upstream for a connection to a listener that exists for this request alone, at the address from
// which the upstream is reached.
func (u *Upstream) askForOwn(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	conn, err := u.dial(ctx)
	if err != nil {
		return err
	}
	defer conn.Close() //nolint:errcheck // nothing is sent through it
	here := *conn.LocalAddr().(*net.TCPAddr)
	here.Port = 0
	l, err := net.ListenTCP("tcp", &here)
	if err != nil {
		return fmt.Errorf("listening for a probe of the upstream: %w", err)
	}
	defer l.Close() //nolint:errcheck // it accepts nothing
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	if _, err := u.speak(conn, Request{Destination: l.Addr().(*net.TCPAddr).AddrPort()}); err != nil {
		return fmt.Errorf("the upstream accepts connections but fails a probe: %w", err)
	}
	u.recordConnected()
	return nil
}
