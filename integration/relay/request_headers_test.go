package relay

import (
	"net"
	"testing"

	"github.com/sluice-cni/sluice/integration/testbed"
)

// TestRequestNamesThePod: the CONNECT request has the pod and the pod's own address, also for a container in the pod.
func TestRequestNamesThePod(t *testing.T) {
	t.Parallel()
	n := testbed.New(t)
	proxy := testbed.StartRecordingProxy(n, testbed.ProxyAddress)
	n.StartDaemon()
	pod := n.AddPod("asking")
	nested := pod.Nested()
	for _, c := range []struct {
		name       string
		from       *testbed.Host
		world, pod string
		port       string
	}{
		{"the pod over IPv4", pod.Host, testbed.WorldIPv4, pod.IPv4, "8001"},
		{"the pod over IPv6", pod.Host, testbed.WorldIPv6, pod.IPv6, "8002"},
		{"a nested container over IPv4", nested, testbed.WorldIPv4, pod.IPv4, "8003"},
		{"a nested container over IPv6", nested, testbed.WorldIPv6, pod.IPv6, "8004"},
	} {
		t.Run(c.name, func(t *testing.T) {
			destination := net.JoinHostPort(c.world, c.port)
			n.World.ServeCaller(destination)
			conn, err := c.from.Dial(testbed.Context(t), "tcp", destination)
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close() //nolint:errcheck // read to its end
			if _, err := testbed.ReadAll(testbed.Context(t), conn); err != nil {
				t.Fatal(err)
			}
			_, port, _ := net.SplitHostPort(conn.LocalAddr().String())
			want := map[string]string{
				"Sluice-Pod-Namespace": "default", "Sluice-Pod-Name": pod.Name(), "Sluice-Pod-Uid": pod.UID(),
				"Sluice-Source": net.JoinHostPort(c.pod, port),
			}
			for _, r := range proxy.Requests() {
				if r.Host != destination {
					continue
				}
				for name, value := range want {
					if got := r.Header.Values(name); len(got) != 1 || got[0] != value {
						t.Errorf("%s: %q, want %q", name, got, value)
					}
				}
				return
			}
			t.Errorf("the proxy was never asked for %s", destination)
		})
	}
}
