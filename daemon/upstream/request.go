package upstream

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"time"

	"github.com/sluice-cni/sluice/daemon/config"
	"github.com/sluice-cni/sluice/plugin/attach"
)

// The three kinds of failure that a waiting connection has to tell apart.
var (
	// ErrLate means that nothing of the connection has reached the destination: dial again.
	ErrLate = errors.New("upstream is late")
	// ErrUnreachable means that the upstream is well and the destination is not.
	ErrUnreachable = errors.New("upstream cannot reach the destination")
	// ErrMisconfigured means that the upstream will answer the same until its configuration, or sluice's, is changed.
	ErrMisconfigured = errors.New("upstream is not configured for sluice")
)

// answerTimeout bounds the wait for the upstream's answer. It is longer than the 135 s after which mitmproxy reports a
// destination that drops SYNs as unreachable: without that report the connection would be tried again.
const answerTimeout = 150 * time.Second

// Conn is a connection to the upstream for one request.
type Conn struct {
	*net.TCPConn
	line net.Conn // request and answer go through it; afterwards the TCP connection is used itself
}

// Request is a request for one connection.
type Request struct {
	Destination netip.AddrPort
	// Source is the pod's address and the connection's source port. For an inbound connection it is the client's.
	Source netip.AddrPort
	Pod    attach.Pod
	// Inbound marks a connection to the pod.
	Inbound bool
	// Trust is that of the pod. Nested marks a connection of a container that a Docker in the pod started.
	Trust  attach.PodTrust
	Nested bool
	// Container is the state of the nested container, or empty if the pod has not opted in.
	Container string
	// More reports whether bytes of the app will follow at once; the upstream then wakes once for both. It may be nil.
	// It is called only if the protocol has no answer: it costs a system call.
	More func() bool
}

// HalfClose reports whether the upstream's protocol carries the end of one direction alone.
func (u *Upstream) HalfClose() bool { return u.protocol != config.Connect }

// Ask asks the upstream on conn for a connection to req.Destination, and returns the first bytes that the destination
// has sent already. The error is ErrLate, ErrUnreachable, ErrMisconfigured or that of ctx; conn is closed then.
func (u *Upstream) Ask(ctx context.Context, conn *Conn, req Request) ([]byte, error) {
	if req.Inbound && conn.RemoteAddr().(*net.TCPAddr).AddrPort().Addr().Unmap() == req.Source.Addr() {
		_ = conn.Close() // nothing was requested on it
		return nil, fmt.Errorf("%w: the upstream itself opened the connection: relayed, it would come back",
			ErrUnreachable)
	}
	_ = conn.SetDeadline(time.Now().Add(answerTimeout)) // fails only on a closed connection, as the next call will
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	first, err := u.speak(conn.line, req)
	stop()
	if err == nil {
		err = conn.SetDeadline(time.Time{})
	}
	u.recordAnswer(err)
	if err != nil {
		_ = conn.Close() // the answer counts
		return nil, err
	}
	return first, nil
}

// speak makes one request in the upstream's protocol.
func (u *Upstream) speak(conn net.Conn, req Request) ([]byte, error) {
	switch u.protocol {
	case config.SOCKS5:
		return askSOCKS5(conn, req)
	case config.ProxyV2:
		return announce(conn, req)
	default:
		return askConnect(conn, req, u.secretFor(conn))
	}
}
