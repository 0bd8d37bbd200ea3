package main

import (
	"encoding/binary"
	"net/netip"
	"os"
	"path/filepath"

	"github.com/sluice-cni/sluice/integration/testbed"
)

// benchProxyV2 compares the time of new connections through HAProxy, which reads the header of the PROXY protocol from
// sluiced and from a client that writes it itself.
func benchProxyV2(b *bench) {
	load := relayLoad{rounds: 15, echoes: 300}
	if b.short {
		load = relayLoad{rounds: 3, echoes: 100}
	}
	n := b.newNode()
	n.SetProtocol("proxy-v2")
	b.startHAProxy(n)
	n.StartDaemon()
	sides := b.sidesOf(n)
	sides[explicit].announces = true
	for _, s := range sides {
		b.tb.must(s.do(echo), "first connection of "+s.name)
	}
	got := b.latency(sides, load)
	b.add(b.compare("proxy-v2", "HAProxy by PROXY protocol: connect and echo, p50, relative to explicit", got, explicit,
		"µs").atMost(1.15))
}

// startHAProxy starts HAProxy, for the daemon and for pods that use it explicitly.
func (b *bench) startHAProxy(n *testbed.Node) {
	conf := filepath.Join(n.Dir, "haproxy.cfg")
	b.tb.must(os.WriteFile(conf, []byte(`
defaults
  mode tcp
  timeout connect 5s
  timeout client 1m
  timeout server 1m
listen upstream
  bind 0.0.0.0:18080 accept-proxy
  server destination *
`), 0o600), "configuration of HAProxy")
	n.WaitListening(testbed.Launch(n.Host, "haproxy", "-db", "-f", conf), testbed.ProxyAddress)
}

// announce writes the header of the PROXY protocol, version 2, for a connection over IPv4 whose source is not known.
func (c conn) announce(to netip.AddrPort) error {
	header := append([]byte("\r\n\r\n\x00\r\nQUIT\n\x21\x11\x00\x0c"), 0, 0, 0, 0)
	header = append(header, to.Addr().AsSlice()...)
	header = binary.BigEndian.AppendUint16(append(header, 0, 0), to.Port())
	_, err := c.Write(header)
	return err
}
