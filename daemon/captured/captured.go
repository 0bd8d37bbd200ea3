// Package captured describes a captured connection: its source, its original destination, and whether it may go there.
package captured

import (
	"errors"
	"net/netip"
	"slices"

	"github.com/sluice-cni/sluice/daemon/conntrack"
	"github.com/sluice-cni/sluice/daemon/gate"
	"github.com/sluice-cni/sluice/daemon/netns"
	"github.com/sluice-cni/sluice/daemon/sockdiag"
	"github.com/sluice-cni/sluice/daemon/socket"
)

// Conn is a captured connection that was accepted at a gate.
type Conn struct {
	*socket.Conn
	// Source is the address and port of the client: the app, or for an inbound connection the peer outside the pod.
	Source netip.AddrPort
	// Destination is the original destination.
	Destination netip.AddrPort
	// Inbound marks a connection to the pod.
	Inbound bool

	gate *gate.Gate
}

// ErrGone is the error of a connection that the app has reset, or has closed before it sent a byte. No process waits
// for its answer. A connection that was closed later is to be served: its data may be all that the app wanted to send.
var ErrGone = errors.New("the app has given up the connection")

// Policy says where captured connections may go.
type Policy struct {
	// Node lets them go to the node's own addresses, and to the services that clouds have for nodes at addresses that
	// are not link-local.
	Node bool
}

// New describes a connection that was accepted at listener l of g. The error says why the connection must not be
// carried on. The Conn is then as complete as it could be made, for the log.
func New(g *gate.Gate, l *gate.Listener, conn *socket.Conn, p Policy) (Conn, error) {
	src := conn.Peer
	c := Conn{Conn: conn, Inbound: l.Inbound, gate: g}
	c.Source = netip.AddrPortFrom(src.Addr().Unmap(), src.Port())
	reset, empty := socket.IsOver(conn)
	if reset {
		return c, ErrGone
	}
	var err error
	if c.Destination, err = conntrack.OriginalDestination(conn); err != nil {
		return c, err
	}
	if empty && c.AppState() == sockdiag.AppClosed {
		return c, ErrGone
	}
	if err := permitted(c.Destination); err != nil {
		return c, err
	}
	if c.Inbound {
		return c, notFromNode(c.Destination, c.Source)
	}
	return c, p.toNode(c.Destination)
}

// Gone returns ErrGone if the app has given up the connection, and nil otherwise. It is called before the first byte is
// read. The socket of an app in a nested container is not seen: Gone returns nil until the app resets the connection.
func (c Conn) Gone() error {
	reset, empty := socket.IsOver(c)
	if reset || empty && c.AppState() == sockdiag.AppClosed {
		return ErrGone
	}
	return nil
}

// AppState says whether a process in the pod still holds the app's end.
func (c Conn) AppState() sockdiag.AppState { return c.gate.AppState(c.Source, c.Destination) }

// metadata are the addresses, beside the link-local ones, at which clouds serve a node's credentials.
var metadata = []netip.Addr{netip.MustParseAddr("fd00:ec2::254"), netip.MustParseAddr("fd20:ce::254")}

// forbidden is the reason for which a destination is refused.
type forbidden string

func (f forbidden) Error() string { return string(f) }

// Cause is the kind of an error of New. There are few kinds, while the text of an error may have an address in it that
// the pod chooses.
func Cause(err error) string {
	var why forbidden
	if errors.As(err, &why) {
		return string(why)
	}
	return "the destination is not known, or cannot be checked"
}

// permitted refuses destinations that mean something else on the node than in the pod. The rules do not redirect them.
// This check holds even if a connection to one arrives all the same.
func permitted(dst netip.AddrPort) error {
	a := dst.Addr().Unmap()
	switch {
	case a.IsLoopback(), a.IsUnspecified():
		return forbidden("the destination would be the node's own loopback")
	case a.IsLinkLocalUnicast():
		return forbidden("the destination is link-local: the node would ask it under its own identity")
	case a.IsMulticast(), a == netip.AddrFrom4([4]byte{255, 255, 255, 255}):
		return forbidden("the destination is not a unicast address")
	}
	if slices.Contains(metadata, a) {
		return forbidden("the destination is a metadata service: the node would ask it under its own identity")
	}
	return nil
}

// nodeServices are addresses of cloud services that trust the node that asks: Azure's and Alibaba's.
var nodeServices = []netip.Addr{netip.MustParseAddr("168.63.129.16"), netip.MustParseAddr("100.100.100.200")}

// toNode refuses destinations that mean the node: a proxy on the node's network reaches them as the node itself, and
// those of the node through its loopback, past the rules for packets from outside.
func (p Policy) toNode(dst netip.AddrPort) error {
	if p.Node {
		return nil
	}
	a := dst.Addr().Unmap()
	if slices.Contains(nodeServices, a) {
		return forbidden("the destination is a cloud's service for nodes: the node would ask it as itself")
	}
	local, err := netns.IsLocal(a)
	if err == nil && local {
		err = forbidden("the destination is this node's own: the proxy would reach it through the node's loopback")
	}
	return err
}

// notFromNode refuses an inbound connection that this node has made to the pod, most likely for the upstream: relayed,
// it would come back without end. The rules do not redirect it either.
func notFromNode(pod, src netip.AddrPort) error {
	node, err := netns.SourceTo(pod.Addr())
	if err == nil && src.Addr() == node {
		err = forbidden("this node itself opened the connection: relayed, it would come back")
	}
	return err
}
