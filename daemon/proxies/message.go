package proxies

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net"
	"net/netip"
	"os"

	"github.com/sluice-cni/sluice/daemon/unixsock"
	"github.com/sluice-cni/sluice/plugin/attach"
)

// version is that of the protocol: docs/proxies.md.
const version = 1

// The kinds of messages.
const (
	kindHello    = "hello"    // both ways, the proxy's first
	kindHeld     = "held"     // from the proxy after its hello: listeners that it has from before
	kindAttach   = "attach"   // to the proxy, with listeners
	kindPod      = "pod"      // to the proxy: the description of a pod has changed
	kindDetach   = "detach"   // to the proxy
	kindDetached = "detached" // from the proxy, which has closed them
	kindPing     = "ping"     // to the proxy
	kindState    = "state"    // from the proxy: the answer
	kindError    = "error"    // to the proxy, before the end
)

// message is one of either side; which fields it has depends on its kind.
type message struct {
	Kind    string `json:"kind"`
	Version int    `json:"version,omitempty"`

	// hello
	Name   string   `json:"name,omitempty"`   // of the proxy
	Labels []string `json:"labels,omitempty"` // of pods, that the proxy asks for
	Held   int      `json:"held,omitempty"`   // how many messages of that kind follow
	Node   string   `json:"node,omitempty"`   // the daemon's

	// attach, pod, detach, detached, held
	ID        string          `json:"id,omitempty"`
	Pod       *podDescription `json:"pod,omitempty"`
	Listeners []listener      `json:"listeners,omitempty"` // the descriptors, in their order

	// state
	Connections int `json:"connections,omitempty"`

	// error
	Error string `json:"error,omitempty"`
}

type podDescription struct {
	Namespace string            `json:"namespace"`
	Name      string            `json:"name"`
	UID       string            `json:"uid"`
	IPs       []string          `json:"ips"`
	Labels    map[string]string `json:"labels,omitempty"`
	Trust     string            `json:"trust,omitempty"`
	TLS       attach.TLSPolicy  `json:"tls,omitempty"`
	Nested    attach.TLSPolicy  `json:"nested,omitempty"`
	// Containers are the states of nested containers by address, if these are given the CA.
	Containers map[netip.Addr]string `json:"containers,omitzero"`
}

type listener struct {
	Direction string `json:"direction"`
}

// maxMessage bounds a message in bytes.
const maxMessage = 64 << 10

func send(c *net.UnixConn, m message, files []*os.File) error {
	data, err := json.Marshal(m)
	if err != nil {
		return err
	}
	return unixsock.Send(c, data, files)
}

// receive returns the next message. Its descriptors are the caller's.
func receive(c *net.UnixConn, buffer []byte) (m message, files []*os.File, err error) {
	n, files, err := unixsock.Receive(c, buffer)
	if err != nil {
		return m, nil, err
	}
	dec := json.NewDecoder(bytes.NewReader(buffer[:n]))
	if err := dec.Decode(&m); err != nil {
		unixsock.Close(files)
		return m, nil, fmt.Errorf("%.100q is not a message: %w", buffer[:n], err)
	}
	return m, files, nil
}
