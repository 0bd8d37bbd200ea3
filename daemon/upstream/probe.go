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
	// probeTimeout is how long an upstream may take to answer a probe.
	probeTimeout = 5 * time.Second
	// probeAgain is how soon one that did not is probed again, at the latest.
	probeAgain = time.Second
)

// keepProbing says whether the upstream is there by whether it serves, until ctx ends: a process that hangs still has a
// kernel that takes its connections.
func (u *Upstream) keepProbing(ctx context.Context) {
	for silent := 0; ctx.Err() == nil; {
		next := u.every
		err := u.probe(ctx)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			silent++
		} else {
			silent = 0
		}
		switch {
		case ctx.Err() != nil:
		case err == nil:
			u.came()
		case ours(err):
			u.log.Warn("cannot probe the upstream", "upstream", u.name, "err", err)
		case silent == 1:
			next = 0 // time has passed for the upstream alone, if it was not for sluiced, stopped with all of its node
		default:
			u.went(err)
			next = min(next, probeAgain)
		}
		select {
		case <-u.dialled:
		case <-time.After(next):
		case <-ctx.Done():
		}
	}
}

// probe asks the upstream for a listener that is there for it alone, at the address from which the upstream is reached.
// Whatever it answers, it serves.
func (u *Upstream) probe(ctx context.Context) error {
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
	defer l.Close() //nolint:errcheck // nobody is accepted
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	_, err = u.ask(conn, Request{Destination: l.Addr().(*net.TCPAddr).AddrPort()})
	if err == nil || errors.Is(err, ErrUnreachable) || errors.Is(err, ErrMisconfigured) {
		return nil
	}
	return fmt.Errorf("it takes connections, and fails a probe: %w", err)
}
