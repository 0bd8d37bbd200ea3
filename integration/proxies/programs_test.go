package proxies

import (
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sluice-cni/sluice/integration/testbed"
)

// behind is the address of a proxy behind HAProxy.
const behind = "127.0.0.1:3128"

// proxy is a real proxy that can be the upstream.
type proxy struct {
	name     string
	protocol string
	// before, unless nil, starts what the proxy needs.
	before func(t *testing.T, n *testbed.Node)
	start  func(t *testing.T, n *testbed.Node) *testbed.Program
}

// proxies are asked for connections.
var proxies = []proxy{
	{"squid", "connect", nil, func(t *testing.T, n *testbed.Node) *testbed.Program {
		t.Helper()
		return startSquid(t, n, testbed.ProxyAddress, "")
	}},
	{"tinyproxy", "connect", nil, func(t *testing.T, n *testbed.Node) *testbed.Program {
		t.Helper()
		return startTinyproxy(t, n, "")
	}},
	{"haproxy", "connect", startSquidBehind, startHAProxyInFront},
	{"dante", "socks5", nil, startDante},
	{"microsocks", "socks5", nil, startMicrosocks},
}

// chained are proxies in front of a Squid, by which alone they connect.
var chained = []proxy{
	{"haproxy", "connect", nil, startHAProxyInFront},
	{"tinyproxy", "connect", nil, func(t *testing.T, n *testbed.Node) *testbed.Program {
		t.Helper()
		return startTinyproxy(t, n, "Upstream http "+behind)
	}},
	{"squid", "connect", nil, func(t *testing.T, n *testbed.Node) *testbed.Program {
		t.Helper()
		host, port := split(t, behind)
		return startSquid(t, n, testbed.ProxyAddress, "never_direct allow all\ncache_peer "+host+" parent "+port+
			" 0 no-query no-digest")
	}},
}

// forEachProxy runs a test for each proxy, on a node of its own.
func forEachProxy(t *testing.T, of []proxy, test func(t *testing.T, n *testbed.Node, p proxy)) {
	t.Helper()
	t.Parallel()
	for _, p := range of {
		t.Run(p.name, func(t *testing.T) {
			t.Parallel()
			n := testbed.NewWith(t, p.protocol)
			if p.before != nil {
				p.before(t, n)
			}
			test(t, n, p)
		})
	}
}

// configure writes the configuration of a program.
func configure(t *testing.T, n *testbed.Node, name, text string) string {
	t.Helper()
	path := filepath.Join(n.Dir, name)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func startSquidBehind(t *testing.T, n *testbed.Node) {
	t.Helper()
	startSquid(t, n, behind, "")
}

func startSquid(t *testing.T, n *testbed.Node, address, more string) *testbed.Program {
	t.Helper()
	host, port := split(t, address)
	conf := configure(t, n, "squid"+port+".conf", `
http_port `+host+`:`+port+`
http_access allow all
cache deny all
cache_log /dev/null
access_log none
pid_filename none
netdb_filename none
coredump_dir none
pinger_enable off
shutdown_lifetime 0 seconds
connect_timeout 1 second
dns_nameservers 127.0.0.1
visible_hostname squid
`+more+"\n")
	// Its files in /dev/shm have the name of the service, which has letters and digits alone.
	service := strings.ReplaceAll(n.Name, "-", "x") + port
	p := testbed.Launch(n.Host, "squid", "-N", "-d", "1", "-n", service, "-f", conf)
	n.WaitListening(p, address)
	return p
}

func startTinyproxy(t *testing.T, n *testbed.Node, more string) *testbed.Program {
	t.Helper()
	host, port := split(t, testbed.ProxyAddress)
	conf := configure(t, n, "tinyproxy.conf", "Listen "+host+"\nPort "+port+"\nTimeout 600\nMaxClients 100\n"+more+"\n")
	p := testbed.Launch(n.Host, "tinyproxy", "-d", "-c", conf)
	n.WaitListening(p, testbed.ProxyAddress)
	return p
}

// startHAProxy starts HAProxy with one proxy section.
func startHAProxy(t *testing.T, n *testbed.Node, section string) *testbed.Program {
	t.Helper()
	conf := configure(t, n, "haproxy.cfg", `
global
  log stdout format raw local0
defaults
  log global
  retries 0
  timeout connect 5s
  timeout client 1m
  timeout server 1m
  timeout client-fin 1m
listen upstream
`+section+"\n")
	p := testbed.Launch(n.Host, "haproxy", "-db", "-f", conf)
	n.WaitListening(p, testbed.ProxyAddress)
	return p
}

// startHAProxyInFront starts HAProxy in front of another proxy. It cannot connect for CONNECT itself.
func startHAProxyInFront(t *testing.T, n *testbed.Node) *testbed.Program {
	t.Helper()
	return startHAProxy(t, n, "  mode http\n  bind "+testbed.ProxyAddress+"\n  server squid "+behind)
}

func startDante(t *testing.T, n *testbed.Node) *testbed.Program {
	t.Helper()
	host, port := split(t, testbed.ProxyAddress)
	conf := configure(t, n, "danted.conf", `
logoutput: stdout
internal: `+host+` port = `+port+`
external: world
clientmethod: none
socksmethod: none
user.privileged: root
user.unprivileged: nobody
client pass { from: 0/0 to: 0/0 }
socks pass { from: 0/0 to: 0/0 }
`)
	p := testbed.Launch(n.Host, "env", "TMPDIR="+n.Dir, "danted", "-f", conf, "-p", filepath.Join(n.Dir, "danted.pid"))
	n.WaitListening(p, testbed.ProxyAddress)
	return p
}

func startMicrosocks(t *testing.T, n *testbed.Node) *testbed.Program {
	t.Helper()
	host, port := split(t, testbed.ProxyAddress)
	p := testbed.Launch(n.Host, "microsocks", "-i", host, "-p", port)
	n.WaitListening(p, testbed.ProxyAddress)
	return p
}

func split(t *testing.T, address string) (host, port string) {
	t.Helper()
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		t.Fatal(err)
	}
	return host, port
}
