package proxies

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sluice-cni/sluice/integration/testbed"
)

// receivers read the header of the PROXY protocol.
var receivers = []proxy{
	{"haproxy", "proxy-v2", nil, func(t *testing.T, n *testbed.Node) *testbed.Program {
		t.Helper()
		return startHAProxy(t, n, `
  mode tcp
  bind `+testbed.ProxyAddress+` accept-proxy
  log-format "from=[%ci]:%cp to=[%[dst]]:%[dst_port]"
  server destination *
`)
	}},
	{"nginx", "proxy-v2", nil, startNginx},
}

func startNginx(t *testing.T, n *testbed.Node) *testbed.Program {
	t.Helper()
	conf := configure(t, n, "nginx.conf", `
load_module /usr/lib/nginx/modules/ngx_stream_module.so;
daemon off;
master_process off;
pid `+filepath.Join(n.Dir, "nginx.pid")+`;
error_log stderr;
events {}
stream {
  map $proxy_protocol_server_addr $destination {
    ~: [$proxy_protocol_server_addr];
    default $proxy_protocol_server_addr;
  }
  log_format ends "from=[$proxy_protocol_addr]:$proxy_protocol_port "
    "to=[$proxy_protocol_server_addr]:$proxy_protocol_server_port";
  access_log /dev/stdout ends;
  server {
    listen `+testbed.ProxyAddress+` proxy_protocol;
    proxy_pass $destination:$proxy_protocol_server_port;
    proxy_half_close on;
  }
}
`)
	p := testbed.Launch(n.Host, "nginx", "-c", conf, "-e", "stderr")
	n.WaitListening(p, testbed.ProxyAddress)
	return p
}

// TestProxyHeaderLeadsToTheDestination, and tells the proxy the pod's own address.
func TestProxyHeaderLeadsToTheDestination(t *testing.T) {
	forEachProxy(t, receivers, func(t *testing.T, n *testbed.Node, p proxy) {
		testbed.ServeEcho(n)
		running := p.start(t, n)
		n.StartDaemon()
		pod := n.AddPod("web")
		nested := pod.Nested()
		testbed.EchoAll(t, 10, 64<<10, pod.Host, nested)
		for _, ends := range []string{
			fmt.Sprintf("from=[%s]:%%d to=[%s]:%s", pod.IPv4, testbed.WorldIPv4, testbed.EchoPort),
			fmt.Sprintf("from=[%s]:%%d to=[%s]:%s", pod.IPv6, testbed.WorldIPv6, testbed.EchoPort),
		} {
			testbed.Eventually(t, "the proxy has logged each "+ends, func() bool {
				before, after, _ := strings.Cut(ends, "%d")
				count := 0
				for line := range strings.Lines(running.Log()) {
					if strings.Contains(line, before) && strings.Contains(line, after) {
						count++
					}
				}
				return count == 10 // half of them from the nested container
			})
		}
		if got := n.SYNs(); got != 0 {
			t.Errorf("%d SYNs left the pod, want none", got)
		}
	})
}

// TestProxyHeaderWaitsForTheProxy: connections wait until its kernel accepts them.
func TestProxyHeaderWaitsForTheProxy(t *testing.T) {
	forEachProxy(t, receivers, func(t *testing.T, n *testbed.Node, p proxy) {
		testbed.ServeEcho(n)
		d := n.StartDaemon()
		pod := n.AddPod("patient")
		for range 2 {
			testbed.Eventually(t, "the upstream is late", func() bool { return !d.Status().Upstream.Ready })
			outcome := testbed.Echoes(t, 100, 200, pod.Host)
			testbed.Eventually(t, "all of them wait", func() bool { return d.Waiting(pod) == 100 })
			testbed.WantPending(t, outcome)
			running := p.start(t, n)
			testbed.WantServed(t, outcome, 100)
			running.Kill()
		}
	})
}

// TestProxyHeaderCarriesHalfCloses, of either side.
func TestProxyHeaderCarriesHalfCloses(t *testing.T) {
	forEachProxy(t, receivers, func(t *testing.T, n *testbed.Node, p proxy) {
		n.World.Serve(testbed.EchoAddresses[0], func(c net.Conn) {
			asked, _ := io.ReadAll(c)
			fmt.Fprintf(c, "got %s", asked)
		})
		p.start(t, n)
		n.StartDaemon()
		pod := n.AddPod("web")
		c := testbed.MustOpen(t, pod.Host, testbed.EchoAddresses[0])
		testbed.Send(t, c, "everything")
		testbed.CloseWrite(t, c)
		testbed.CheckReads(t, "the app", c, "got everything")
		testbed.CheckReadFails(t, "the app", c, io.EOF)
	})
}

// TestProxyHeaderNamesThePod: Debian 12 has no proxy that shows these fields, so the test reads them itself.
func TestProxyHeaderNamesThePod(t *testing.T) {
	t.Parallel()
	n := testbed.NewWith(t, "proxy-v2")
	headers := make(chan string, 2)
	n.Serve(testbed.ProxyAddress, func(c net.Conn) {
		fixed := make([]byte, 16)
		if _, err := io.ReadFull(c, fixed); err != nil {
			return // the idle connection
		}
		rest := make([]byte, int(fixed[14])<<8|int(fixed[15]))
		if _, err := io.ReadFull(c, rest); err != nil {
			return
		}
		headers <- string(rest)
		_, _ = io.Copy(c, c)
	})
	n.StartDaemon()
	pod := n.AddPod("web")
	if err := testbed.Echo(testbed.Context(t), pod.Host, testbed.EchoAddresses[0], []byte("x")); err != nil {
		t.Fatal(err)
	}
	const addresses = 4 + 4 + 2 + 2
	field := func(kind byte, value string) string { return string([]byte{kind, 0, byte(len(value))}) + value }
	got := (<-headers)[addresses:]
	if want := field(0xe0, "default") + field(0xe1, pod.Name()) + field(0xe2, pod.UID()); got != want {
		t.Errorf("got %q; want %q", got, want)
	}
}

// TestProbeThroughRealProxies: the probe is a connection to the daemon.
func TestProbeThroughRealProxies(t *testing.T) {
	forEachProxy(t, append(receivers, proxies...), func(t *testing.T, n *testbed.Node, p proxy) {
		n.Config["upstream"].(map[string]any)["probeInterval"] = "1s"
		d := n.StartDaemon()
		running := p.start(t, n)
		testbed.Eventually(t, "the upstream is there", func() bool { return d.Status().Upstream.Ready })
		running.Freeze()
		testbed.Eventually(t, "the upstream that hangs is late", func() bool { return !d.Status().Upstream.Ready })
	})
}

// TestProxyHeaderToADeadDestinationEnds: the proxy ends the connection, and sluiced does not ask again.
func TestProxyHeaderToADeadDestinationEnds(t *testing.T) {
	forEachProxy(t, receivers, func(t *testing.T, n *testbed.Node, p proxy) {
		p.start(t, n)
		d := n.StartDaemon()
		pod := n.AddPod("unlucky")
		for _, ip := range []string{testbed.WorldIPv4, testbed.WorldIPv6} {
			got, err := pod.Caller(testbed.Context(t), net.JoinHostPort(ip, "81"))
			t.Logf("the app reads %q, %v", got, err)
			if errors.Is(err, os.ErrDeadlineExceeded) || got != "" {
				t.Errorf("got %q, %v; want the end of the connection", got, err)
			}
		}
		if got := d.Of(pod).Waiting; got != 0 {
			t.Errorf("%d connections wait, want none", got)
		}
	})
}
