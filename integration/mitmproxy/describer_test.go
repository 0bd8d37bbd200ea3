package mitmproxy

import (
	"encoding/json"
	"fmt"
	"maps"
	"net"
	"path/filepath"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-cni/sluice/integration/testbed"
)

// trust is how far a pod trusts the proxy's CA, and the policies for TLS: fields of its description, by name.
type trust map[string]string

// describer passes messages between proxies and sluiced, and adds the trust to the descriptions of pods.
type describer struct {
	node   *testbed.Node
	socket string

	mu      sync.Mutex
	trust   trust
	pods    map[string]map[string]any // as sluiced describes them, by id
	proxies []*net.UnixConn
	pings   int // to proxies
	states  int // from proxies
}

// describePods listens for proxies until the test ends.
func describePods(t *testing.T, n *testbed.Node, tr trust) *describer {
	t.Helper()
	d := &describer{
		node: n, socket: filepath.Join(n.Dir, "described.sock"), trust: tr, pods: map[string]map[string]any{},
	}
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: d.socket, Net: "unixpacket"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			proxy, err := l.AcceptUnix()
			if err != nil {
				return // closed: the test has ended
			}
			go d.serve(proxy)
		}
	}()
	return d
}

func (d *describer) serve(proxy *net.UnixConn) {
	sluiced, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: d.node.ProxySocket(), Net: "unixpacket"})
	if err != nil {
		_ = proxy.Close() // it connects again
		return
	}
	d.mu.Lock()
	d.proxies = append(d.proxies, proxy)
	d.mu.Unlock()
	go d.forward(proxy, sluiced)
	d.forward(sluiced, proxy)
}

// forward passes messages and their descriptors on until one side closes the connection.
func (d *describer) forward(from, to *net.UnixConn) {
	defer from.Close() //nolint:errcheck // both ends have their own errors
	defer to.Close()   //nolint:errcheck // likewise
	message, rights := make([]byte, 64<<10), make([]byte, unix.CmsgSpace(16*4))
	for {
		n, oobn, _, _, err := from.ReadMsgUnix(message, rights)
		if err != nil || n == 0 {
			return
		}
		if d.pass(to, message[:n], rights[:oobn]) != nil {
			return
		}
	}
}

// pass sends one message, with the trust if it describes a pod.
func (d *describer) pass(to *net.UnixConn, message, rights []byte) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	defer closeRights(rights)
	var m map[string]any
	if err := json.Unmarshal(message, &m); err != nil {
		return fmt.Errorf("a message of the proxy protocol: %w", err)
	}
	switch m["kind"] {
	case "attach", "pod":
		pod := m["pod"].(map[string]any)
		d.pods[m["id"].(string)] = pod
		m["pod"] = d.described(pod)
		message, _ = json.Marshal(m) // it came as JSON
	case "ping":
		d.pings++
	case "state":
		d.states++
	}
	_, _, err := to.WriteMsgUnix(message, rights, nil)
	return err
}

// described is a pod with the trust.
func (d *describer) described(pod map[string]any) map[string]any {
	pod = maps.Clone(pod)
	for name, value := range d.trust {
		pod[name] = value
	}
	return pod
}

// change tells the proxies another trust, and waits until they know it.
func (d *describer) change(tr trust) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.trust = tr
	for id, pod := range d.pods {
		message, err := json.Marshal(map[string]any{"kind": "pod", "id": id, "pod": d.described(pod)})
		if err != nil {
			return err
		}
		for _, proxy := range d.proxies {
			if _, err := proxy.Write(message); err != nil {
				return fmt.Errorf("describing a pod: %w", err)
			}
		}
	}
	pings := d.pings
	d.mu.Unlock()
	defer d.mu.Lock()
	return soon("a proxy answers a later ping", func() bool {
		d.mu.Lock()
		defer d.mu.Unlock()
		return d.states > pings
	})
}

// closeRights closes the descriptors of a message.
func closeRights(rights []byte) {
	messages, _ := unix.ParseSocketControlMessage(rights) // the kernel has made them
	for _, m := range messages {
		fds, _ := unix.ParseUnixRights(&m) // likewise
		for _, fd := range fds {
			_ = unix.Close(fd) // the receiver has its own
		}
	}
}
