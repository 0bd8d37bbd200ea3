package testbed

import (
	"cmp"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
)

// RawTCP are arguments that keep mitmproxy from guessing the protocol: it may take text for HTTP.
var RawTCP = []string{"--tcp-hosts", ".*"}

// mitmproxyVariable is an environment variable. It names the version of mitmproxy, one of those in bin/mitmproxy, that
// nodes run unless they name another.
const mitmproxyVariable = "SLUICE_MITMPROXY"

// Mitmproxy returns the path of a program of mitmproxy, mitmdump or mitmweb, in the node's version of it.
func (n *Node) Mitmproxy(program string) string {
	n.tb.Helper()
	return Mitmproxy(n.tb, n.MitmproxyVersion, program)
}

// Mitmproxy returns the path of a program of mitmproxy in a version; empty: in that which nodes run by default.
func Mitmproxy(tb TB, version, program string) string {
	tb.Helper()
	path, err := mitmproxy(version, program)
	if err != nil {
		tb.Fatalf("%v", err)
	}
	return path
}

// mitmproxy returns the path of a program of mitmproxy. Without a version it is the newest for the machine's Python, or
// Debian's where that is not installed.
func mitmproxy(version, program string) (string, error) {
	named := cmp.Or(version, os.Getenv(mitmproxyVariable))
	root, err := moduleRoot()
	if err != nil {
		return "", err
	}
	path := filepath.Join(root, "bin", "mitmproxy", cmp.Or(named, "default"), program)
	_, err = os.Stat(path)
	switch {
	case err == nil:
		return path, nil
	case named == "":
		return exec.LookPath(program)
	default:
		return "", fmt.Errorf("mitmproxy %s (integration/mitmproxy.sh install %s): %w", named, named, err)
	}
}

// Addon is the addon by which mitmproxy accepts in the netns of pods.
func Addon(tb TB) string {
	tb.Helper()
	return SourceFile(tb, "deploy/mitmproxy/sluice.py")
}

// StartMitmdump starts mitmdump as the node's proxy and waits until it listens.
func StartMitmdump(n *Node, args ...string) *Program {
	n.tb.Helper()
	p := LaunchMitmdump(n, args...)
	n.WaitListening(p, ProxyAddress)
	return p
}

// Confdir is where mitmdump keeps its CA. It is the same for every start.
func Confdir(n *Node) string { return filepath.Join(n.Dir, "mitmproxy") }

// LaunchMitmdump is StartMitmdump that does not wait.
func LaunchMitmdump(n *Node, args ...string) *Program {
	n.tb.Helper()
	host, port, err := net.SplitHostPort(ProxyAddress)
	if err != nil {
		n.tb.Fatalf("%v", err)
	}
	if err := copyMitmproxyCA(n); err != nil {
		n.tb.Fatalf("mitmproxy's CA: %v", err)
	}
	return Launch(n.Host, n.Mitmproxy("mitmdump"), append([]string{
		"--listen-host", host, "--listen-port", port, "--set", "confdir=" + Confdir(n),
	}, args...)...)
}

// copyMitmproxyCA gives the node the CA that all tests share, unless it has one. To generate one takes mitmdump as long
// as to start.
func copyMitmproxyCA(n *Node) error {
	if _, err := os.Stat(Confdir(n)); err == nil {
		return nil
	}
	ca, err := mitmproxyCA()
	if err != nil {
		return err
	}
	return os.CopyFS(Confdir(n), os.DirFS(ca))
}

// mitmproxyCA returns a folder with a CA that mitmdump has generated, in bin/testing, where binaries are too.
var mitmproxyCA = sync.OnceValues(func() (dir string, err error) {
	root, err := moduleRoot()
	if err != nil {
		return "", err
	}
	shared := filepath.Join(root, "bin", "testing")
	if err := os.MkdirAll(shared, 0o755); err != nil {
		return "", err
	}
	unlock, err := lock(filepath.Join(shared, ".mitmproxy.lock"))
	if err != nil {
		return "", err
	}
	defer unlock()
	dir = filepath.Join(shared, "mitmproxy")
	if _, err := os.Stat(dir); err == nil {
		return dir, nil
	}
	temporary, err := os.MkdirTemp(shared, "mitmproxy-")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(temporary) //nolint:errcheck // it has another name by then, or there is an error
	const program = "from mitmproxy import ctx\n\ndef running(): ctx.master.shutdown()\n"
	script := filepath.Join(temporary, "shutdown.py")
	if err := os.WriteFile(script, []byte(program), 0o600); err != nil {
		return "", err
	}
	made := filepath.Join(temporary, "ca")
	mitmdump, err := mitmproxy("", "mitmdump")
	if err != nil {
		return "", err
	}
	out, err := exec.Command(mitmdump, "--no-server", "--set", "confdir="+made, "-s", script).CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("mitmdump: %w\n%s", err, out)
	}
	return dir, os.Rename(made, dir)
})

// LaunchAddon launches mitmdump with the addon as a proxy of the protocol `sockets`, and does not wait for it.
func LaunchAddon(n *Node, args ...string) *Program {
	n.tb.Helper()
	return LaunchMitmdump(n, append([]string{
		"--showhost", "--set", "server=false", "--set", "sluice_socket=" + n.ProxySocket(), "-s", Addon(n.tb),
	}, args...)...)
}

// WaitForProxies waits until d knows count proxies and each of them has the sockets of that many pods.
func (d *Daemon) WaitForProxies(count, pods int) {
	d.tb.Helper()
	Eventually(d.tb, fmt.Sprintf("%d proxies have the sockets of %d pods", count, pods), func() bool {
		up := d.Status().Upstream
		for _, p := range up.Proxies {
			if p.Pods != pods {
				return false
			}
		}
		return up.Ready && len(up.Proxies) == count
	})
}

// FlowPrinter writes an addon for mitmproxy that prints the pod and the comment of every flow, and returns its path.
func FlowPrinter(n *Node) string {
	n.tb.Helper()
	const program = `
def tell(kind, flow):
    m = flow.metadata
    print(kind, "from", flow.client_conn.peername[0],
          "of", m.get("sluice.pod"), m.get("sluice.uid"), m.get("sluice.direction"),
          "comment", flow.comment, flush=True)

def response(flow): tell("http", flow)
def tcp_end(flow): tell("tcp", flow)
`
	path := filepath.Join(n.Dir, "flow_printer.py")
	if err := os.WriteFile(path, []byte(program), 0o600); err != nil {
		n.tb.Fatalf("the addon that prints flows: %v", err)
	}
	return path
}
