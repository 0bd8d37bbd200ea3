package mitmproxy

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"strconv"
	"testing"
	"time"

	"github.com/sluice-cni/sluice/integration/testbed"
)

// protocol is a connection from a pod to the world through mitmproxy, and the expectations of both its ends.
type protocol struct {
	name   string
	client script
	server server // nil: there is none
	to     string // the server's IP, unless it is the world's
}

// server serves at an address in a netns. The channel gets the outcome of a connection.
type server interface {
	serve(ctx context.Context, h *testbed.Host, address string, config *tls.Config) <-chan error
}

// Addresses without a server: the node has no route to the first, and the world drops packets to the second.
const (
	unreachable = "203.0.113.10"
	dropping    = "198.51.100.11"
)

// protocolTimeout bounds one protocol. A protocol that hangs in mitmproxy takes as long.
const protocolTimeout = 30 * time.Second

// protocols are the table of the tests. They run at the same time, through the same mitmproxy.
func protocols() []protocol {
	const (
		plain  = "http://" + site + "/plain"
		secret = "https://" + site + "/secret"
		raw    = "\x01 no known protocol"
	)
	sse, h2 := make(events), &together{all: make(chan struct{})}
	return []protocol{
		{"HTTP/1", script{get(1, plain)}, web{tellRequest, false}, ""},
		{"HTTP/1, kept alive", script{get(1, plain+"1", plain+"2", plain+"3")}, web{tellRequest, false}, ""},
		{"HTTPS, kept alive", script{get(1, secret+"1", secret+"2")}, web{tellRequest, true}, ""},
		{"HTTP/2, kept alive", script{get(2, secret+"1", secret+"2")}, web{tellRequest, true}, ""},
		{"HTTP/2, 100 streams", script{browse(h2.ask)}, web{h2.answer, true}, ""},
		{"gRPC-like streams", script{browse(exchangeFrames)}, web{echoFrames, true}, ""},
		{"WebSocket", script{exchangeMessages}, web{echoMessages, false}, ""},
		{"WebSocket over TLS", script{startTLS, exchangeMessages}, web{echoMessages, true}, ""},
		{"server-sent events", script{browse(sse.read)}, web{sse.send, false}, ""},

		{"TCP", script{say(raw), hear("\x01yes"), hearEnd}, script{hear(raw), say("\x01yes")}, ""},
		{
			"TLS, not HTTP", script{startTLS, say(raw), hear("\x01yes"), hearEnd},
			script{startTLS, hear(raw), say("\x01yes"), endWriting}, "",
		},
		{
			"server speaks first", script{hear(banner), say("SSH-2.0-pod\r\n"), hear("ok")},
			script{say(banner), hear("SSH-2.0-pod\r\n"), say("ok")}, "",
		},
		{
			"STARTTLS",
			script{hear("220 hi\r\n"), say("STARTTLS\r\n"), hear("220 go\r\n"), startTLS, say(raw), hear("ok")},
			script{say("220 hi\r\n"), hear("STARTTLS\r\n"), say("220 go\r\n"), startTLS, hear(raw), say("ok")}, "",
		},
		{"memcached", script{say("get x\r\n"), hear("END\r\n")}, script{hear("get x\r\n"), say("END\r\n")}, ""},
		{"PING of Redis", script{say("PING\r\n"), hear("+PONG\r\n")}, script{hear("PING\r\n"), say("+PONG\r\n")}, ""},
		{
			"AMQP", script{say("AMQP\x00\x00\x09\x01"), hear("\x01\x00")},
			script{hear("AMQP\x00\x00\x09\x01"), say("\x01\x00")}, "",
		},

		{
			"client half-closes TCP", script{say(raw), endWriting, hear("\x01answer"), hearEnd},
			script{hear(raw), hearEnd, say("\x01answer")}, "",
		},
		{
			"client half-closes TLS", script{startTLS, say(raw), endWriting, hear("\x01answer"), hearEnd},
			script{startTLS, hear(raw), hearEnd, say("\x01answer"), endWriting}, "",
		},
		{
			"client half-closes HTTP/1",
			script{say("GET /plain HTTP/1.1\r\nHost: " + site + "\r\n\r\n"), endWriting, hear("HTTP/1.1 200 OK\r\n")},
			web{tellRequest, false}, "",
		},
		{
			// Up to 9.0.1 the client's end is passed on thereafter on some runs only, so the server does not want it.
			"server half-closes TCP", script{say(raw), hear("\x01bye"), hearEnd, say("\x01more"), endWriting},
			script{hear(raw), say("\x01bye"), endWriting, hear("\x01more")}, "",
		},
		{"server ends, both silent", script{hearEnd}, script{endWriting, hearEnd}, ""},

		{"refused, silent client", script{hearReset}, nil, ""},
		{"refused, HTTP", script{say("GET / HTTP/1.1\r\nHost: " + site + "\r\n\r\n"), hearReset}, nil, ""},
		{"refused, silent client, IPv6", script{hearReset}, nil, testbed.WorldIPv6},
		{"unreachable", script{hearReset}, nil, unreachable},
		{"dropped", script{hearReset}, nil, dropping},
		{
			"server resets", script{say(raw), hear("\x01yes"), say("\x01go"), hearReset},
			script{hear(raw), say("\x01yes"), hear("\x01go"), reset}, "",
		},
		{
			"client resets", script{say(raw), hear("\x01yes"), reset},
			script{hear(raw), say("\x01yes"), hearGone}, "",
		},
	}
}

// largeBodies are protocols that run alone.
func largeBodies() []protocol {
	return []protocol{
		{"200 MB down", script{browse(download)}, web{load, false}, ""},
		{"200 MB up", script{browse(upload)}, web{load, false}, ""},
	}
}

// run runs one protocol in a scene, at a port of its own.
func (p protocol) run(t *testing.T, s *scene, port int) error {
	t.Helper()
	return p.begin(t, s, port)()
}

// begin starts the server of a protocol. The result runs the client and returns the outcome of both.
func (p protocol) begin(t *testing.T, s *scene, port int) func() error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), protocolTimeout)
	address := net.JoinHostPort(cmp.Or(p.to, testbed.WorldIPv4), strconv.Itoa(port))
	served := make(<-chan error)
	if p.server != nil {
		served = p.server.serve(ctx, s.node.World, address, s.serverTLS)
	}
	return func() error {
		defer cancel()
		err := p.client.as(ctx, s.pod.Host, address, s.clientTLS)
		if p.server == nil {
			return err
		}
		if err != nil {
			cancel() // the server's outcome is of interest only if it is there
		}
		select {
		case serverErr := <-served:
			if serverErr != nil {
				err = errors.Join(err, fmt.Errorf("the server: %w", serverErr))
			}
		case <-ctx.Done():
			err = cmp.Or(err, errors.New("the server has not ended"))
		}
		return err
	}
}
