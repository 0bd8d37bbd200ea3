package direct

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"strings"
	"syscall"
	"testing"

	"github.com/sluice-cni/sluice/integration/testbed"
)

func TestMain(m *testing.M) { os.Exit(testbed.Main(m)) }

// TestFailedDialLeavesNoExemption: another process could use the port of a conntrack entry that is left.
func TestFailedDialLeavesNoExemption(t *testing.T) {
	t.Parallel()
	h := testbed.NewHost(t, "pod")
	h.IP("link", "add", "eth0", "type", "veth", "peer", "name", "eth1")
	h.IP("link", "set", "eth1", "up")
	h.IP("addr", "add", "10.0.0.5/24", "dev", "eth0")
	h.IP("addr", "add", "fd00::5/64", "dev", "eth0", "nodad")
	h.IP("link", "set", "eth0", "up")
	for command, address := range map[string]string{"iptables": "10.0.0.5", "ip6tables": "fd00::5"} {
		h.Exec(command, "-t", "nat", "-A", "OUTPUT", "-p", "tcp", "-d", address, "--dport", "81",
			"-j", "REDIRECT", "--to-ports", "15001")
	}
	redirected := make(chan string, 2)
	h.Serve(":80", func(c net.Conn) {
		buffer := make([]byte, 10)
		_, _ = c.Read(buffer) // returns at the end of the test
	})
	h.Serve(":15001", func(c net.Conn) { redirected <- c.LocalAddr().String() })
	for _, ip := range []string{"10.0.0.5", "fd00::5"} {
		captured, err := h.Dial(t.Context(), "tcp", net.JoinHostPort(ip, "80"))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = captured.Close() })
		conn := captured.(*net.TCPConn)
		to := func(ip string, port uint16) netip.AddrPort { return netip.AddrPortFrom(netip.MustParseAddr(ip), port) }
		if _, err := dial(t.Context(), conn, to(ip, 81)); !errors.Is(err, syscall.ECONNREFUSED) {
			t.Errorf("closed port: got %v, want %v", err, syscall.ECONNREFUSED)
		}
		unrouted := map[string]string{"10.0.0.5": "203.0.113.1", "fd00::5": "2001:db8::1"}[ip]
		if _, err := dial(t.Context(), conn, to(unrouted, 81)); !errors.Is(err, syscall.ENETUNREACH) {
			t.Errorf("no route: got %v, want %v", err, syscall.ENETUNREACH)
		}
		unused := map[string]string{"10.0.0.5": "10.0.0.6", "fd00::5": "fd00::6"}[ip]
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() {
			_, err := dial(ctx, conn, to(unused, 81))
			ended <- err
		}()
		entry := fmt.Sprintf("dst=%s ", unused)
		testbed.Eventually(t, "the SYN waits for an answer", func() bool {
			return strings.Contains(conntrackTable(h), entry)
		})
		cancel()
		if err := <-ended; !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("cancelled: got %v, want %v", err, os.ErrDeadlineExceeded)
		}
	}
	if left := conntrackTable(h); strings.Contains(left, "dport=81 ") {
		t.Errorf("conntrack entries are left:\n%s", left)
	}
	if len(redirected) > 0 {
		t.Errorf("a connection was redirected to %s", <-redirected)
	}
}

// conntrackTable lists the conntrack entries of both families.
func conntrackTable(h *testbed.Host) string {
	return h.Exec("conntrack", "-L") + h.Exec("conntrack", "-L", "-f", "ipv6")
}

// TestDialAvoidsPortsThatConntrackKnows: their former user has left an entry with a redirect, and a new connection
// would follow it.
func TestDialAvoidsPortsThatConntrackKnows(t *testing.T) {
	t.Parallel()
	h := testbed.NewHost(t, "pod")
	h.IP("addr", "add", "10.0.0.5/32", "dev", "lo")
	h.Exec("iptables", "-t", "nat", "-A", "OUTPUT", "-p", "tcp", "--dport", "81",
		"-j", "REDIRECT", "--to-ports", "15001")
	h.Serve(":80", func(c net.Conn) { _, _ = c.Read(make([]byte, 1)) }) // returns at the end of the test
	for port, answer := range map[string]string{"81": "direct", "15001": "redirected"} {
		h.Serve(":"+port, func(c net.Conn) { fmt.Fprint(c, answer) })
	}
	c, err := h.Dial(t.Context(), "tcp", "10.0.0.5:80")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	h.Exec("sysctl", "-qw", "net.ipv4.ip_local_port_range=2000 2003")
	for _, port := range []string{"2000", "2001", "2002"} {
		h.Exec("conntrack", "-I", "-p", "tcp", "-s", "10.0.0.5", "-d", "10.0.0.5", "--sport", port, "--dport", "81",
			"--state", "TIME_WAIT", "-u", "SEEN_REPLY,ASSURED", "-t", "60", "--dst-nat", "10.0.0.5:15001")
	}
	dst := netip.MustParseAddrPort("10.0.0.5:81")
	to, err := dial(t.Context(), c.(*net.TCPConn), dst)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := io.ReadAll(to); string(got) != "direct" || err != nil {
		t.Errorf("got %q, %v; want the answer of the destination itself", got, err)
	}
	_ = to.Close()
	if _, err := dial(t.Context(), c.(*net.TCPConn), dst); !errors.Is(err, ErrNotExempt) {
		t.Errorf("every port is known to conntrack: got %v, want %v", err, ErrNotExempt)
	}
}
