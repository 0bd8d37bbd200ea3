package integration

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-cni/sluice/integration/testbed"
)

// TestCapturePortIsNoWayIn: port 15001 takes what was redirected to it and nothing else, whoever asks and
// whether the daemon is there or not.
func TestCapturePortIsNoWayIn(t *testing.T) {
	t.Parallel()
	for _, f := range flavours {
		t.Run(f.name, func(t *testing.T) {
			t.Parallel()
			n := testbed.NewNode(t, bin)
			proxy := startRecordingProxy(n, testbed.ProxyAddress)
			serveCaller(n.World, web)
			d := n.StartDaemon()
			pod := f.addPod(t, n, "target", nil)
			nested := pod.Nested()
			other := addBystander(t, n)
			knock := func() {
				var wg sync.WaitGroup
				for _, c := range []struct {
					from      *testbed.Host
					addresses []string
				}{
					{n.Host, []string{pod.IPv4, pod.IPv6}},
					{n.World, []string{pod.IPv4, pod.IPv6}},
					{other.Host, []string{pod.IPv4, pod.IPv6}},
					{pod.Host, []string{"127.0.0.1", "127.5.5.5", "::1", pod.IPv4, pod.IPv6, "172.30.0.1", "fd00:30::1"}},
					{nested, []string{"172.30.0.1", "fd00:30::1", pod.IPv4, pod.IPv6}},
				} {
					for _, a := range c.addresses {
						wg.Go(func() { wantNobody(t, c.from, net.JoinHostPort(a, "15001")) })
					}
				}
				wg.Wait()
			}
			// The gate is open, and yet:
			wantCaller(t, pod.Host, web, nodeIPv4)
			knock()
			if r := proxy.requests(); len(r) != 1 {
				t.Errorf("the proxy was asked %d times, want only for %s", len(r), web)
			}
			d.Kill()
			knock()
		})
	}
}

// TestCapturePortOfAnotherPod: a captured pod that connects to another's capture port gets as far as its own
// gate, and what the proxy dials on its behalf is nobody's.
func TestCapturePortOfAnotherPod(t *testing.T) {
	t.Parallel()
	n := testbed.NewNode(t, bin)
	proxy := startRecordingProxy(n, testbed.ProxyAddress)
	d := n.StartDaemon()
	target, other := n.AddPod("target"), n.AddPod("other")
	for _, ip := range []string{target.IPv4, target.IPv6} {
		address := net.JoinHostPort(ip, "15001")
		if got, err := callerAt(patience(t), other.Host, address); err == nil {
			t.Errorf("connecting to %s got %q and a clean end; want a reset", address, got)
		}
		if !proxy.asked(address) {
			t.Errorf("the proxy was never asked for %s", address)
		}
	}
	if s := d.Of(target); s.Open != 0 || s.Waiting != 0 || s.Bytes != 0 {
		t.Errorf("the target has %d open and %d waiting connections, and %d bytes; want none", s.Open, s.Waiting, s.Bytes)
	}
}

// TestDestinationsThatMeanSomethingElseOnTheNode: whatever leads such a connection to the listener, the proxy
// is never asked for it: it would answer with what the node may see.
func TestDestinationsThatMeanSomethingElseOnTheNode(t *testing.T) {
	t.Parallel()
	n := testbed.NewNode(t, bin)
	n.Config["capture"] = map[string]any{"source": "all", "excludeCIDRs": []string{}}
	proxy := startRecordingProxy(n, testbed.ProxyAddress)
	serveCaller(n.World, web)
	d := n.StartDaemon()
	pod := n.AddPod("curious")
	for _, c := range []struct{ destination, rule string }{
		// Captured, since nothing is excluded.
		{"169.254.169.254:80", ""},
		{"169.254.170.2:80", ""},
		{"[fd00:ec2::254]:80", ""},
		{"[fd20:ce::254]:80", ""},
		// Never captured; the pod's own rules see to it.
		{"127.0.0.1:9999", "iptables -d 127.0.0.1 --dport 9999"},
		{"127.8.8.8:9999", "iptables -d 127.8.8.8 --dport 9999"},
		{"[::1]:9999", "ip6tables -d ::1 --dport 9999"},
	} {
		t.Run(c.destination, func(t *testing.T) {
			if c.rule != "" {
				redirect(pod, c.rule)
			}
			wantReset(t, pod.Host, c.destination)
			if proxy.asked(c.destination) {
				t.Error("the proxy was asked for it")
			}
			want := "to=" + c.destination
			testbed.Eventually(t, "the daemon says that it refused a connection "+want, func() bool {
				return strings.Contains(strings.ReplaceAll(d.Log(), `"`, ""), want)
			})
		})
	}
	wantCaller(t, pod.Host, web, nodeIPv4)
}

// TestMetadataServiceBehindOwnRules: the same where the addresses are excluded, as by default they are.
func TestMetadataServiceBehindOwnRules(t *testing.T) {
	t.Parallel()
	n := testbed.NewNode(t, bin)
	proxy := startRecordingProxy(n, testbed.ProxyAddress)
	n.StartDaemon()
	pod := n.AddPod("clever")
	redirect(pod, "iptables -d 169.254.169.254")
	redirect(pod, "ip6tables -d fd00:ec2::254")
	for _, destination := range []string{"169.254.169.254:80", "[fd00:ec2::254]:80"} {
		wantReset(t, pod.Host, destination)
	}
	if r := proxy.requests(); len(r) > 0 {
		t.Errorf("the proxy was asked for %s", r[0].Host)
	}
}

// redirect adds a rule of the pod's own that leads to the capture port.
func redirect(pod *testbed.Pod, rule string) {
	w := strings.Fields(rule)
	args := append([]string{"-t", "nat", "-I", "OUTPUT", "-p", "tcp"}, w[1:]...)
	pod.Exec(w[0], append(args, "-j", "REDIRECT", "--to-ports", "15001")...)
}

// wantReset fails the test unless a connection is accepted, and then reset without a byte.
func wantReset(t *testing.T, h *testbed.Host, address string) {
	t.Helper()
	got, err := callerAt(patience(t), h, address)
	if !errors.Is(err, unix.ECONNRESET) || got != "" {
		t.Errorf("connecting to %s got %q, %v; want a reset", address, got, err)
	}
}

// TestAgentSocketIsForRoot: by its mode, and where something else makes it reachable, by who connects.
func TestAgentSocketIsForRoot(t *testing.T) {
	t.Parallel()
	n := testbed.NewNode(t, bin)
	// Everybody may look here; only the socket itself is in the way.
	dir := t.TempDir()
	for _, d := range []string{dir, filepath.Dir(dir)} {
		if err := os.Chmod(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	socket := filepath.Join(dir, "agent.sock")
	n.Config["agentSocket"] = socket
	d := testbed.Launch(n.Host, filepath.Join(bin, "sluiced"), "run", "--config", configFile(t, n.Config))
	asRoot := func() error { return askSocket(t.Context(), socket, 0) }
	testbed.Eventually(t, "the daemon answers root", func() bool { return asRoot() == nil })

	info, err := os.Stat(socket)
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("mode of the agent socket: %v, %v; want 0600", info.Mode().Perm(), err)
	}
	if err := askSocket(t.Context(), socket, 65534); errors.Is(err, unix.EINVAL) {
		t.Fatal("this user namespace knows one user only: to see another one turned away, run this test as root")
	} else if !errors.Is(err, unix.EACCES) {
		t.Errorf("asking as nobody: %v; want permission denied", err)
	}
	if err := os.Chmod(socket, 0o666); err != nil {
		t.Fatal(err)
	}
	if err := askSocket(t.Context(), socket, 65534); !errors.Is(err, io.EOF) && !errors.Is(err, unix.ECONNRESET) && !errors.Is(err, unix.EPIPE) {
		t.Errorf("asking as nobody where the mode allows it: %v; want the daemon to hang up", err)
	}
	if err := asRoot(); err != nil {
		t.Errorf("asking as root afterwards: %v", err)
	}
	testbed.Eventually(t, "the daemon says that it turned somebody away", func() bool {
		return strings.Contains(d.Log(), "peer turned away")
	})
}

// askSocket asks for the daemon's status as uid.
func askSocket(ctx context.Context, socket string, uid int) error {
	c, err := dialAs(socket, uid)
	if err != nil {
		return err
	}
	defer c.Close() //nolint:errcheck // asked once
	resp, err := askRaw(ctx, c, "GET /v1/status HTTP/1.1\r\nHost: sluiced\r\n\r\n")
	if err != nil {
		return err
	}
	return resp.Body.Close()
}

// dialAs connects on a thread of that user. The thread is not given back.
func dialAs(socket string, uid int) (net.Conn, error) {
	type result struct {
		conn net.Conn
		err  error
	}
	done := make(chan result)
	go func() {
		runtime.LockOSThread() // for good: it ends with the goroutine
		if uid != 0 {
			// Of this thread alone; syscall.Setresuid would change them all.
			if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, uintptr(uid), uintptr(uid), uintptr(uid)); errno != 0 {
				done <- result{nil, errno}
				return
			}
		}
		c, err := net.Dial("unix", socket)
		done <- result{c, err}
	}()
	r := <-done
	return r.conn, r.err
}
