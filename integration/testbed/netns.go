// Package testbed builds small worlds out of network namespaces for tests and benchmarks: a node with a bridge, pods
// added through a real CNI chain, and a world outside that the pods talk to.
//
//	world (198.51.100.10, 2001:db8::10) ──veth── node ──bridge cni0── pod, pod, …
//
// The node is a netns: nothing changes in the machine's own network, and any number of nodes exist side by side.
//
// A test begins with a few lines of these:
//
//	n := testbed.New(t)                     // a node, and the world
//	ServeEcho(n)                           // an echo service in the world
//	proxy := StartConnectProxy(n)
//	d := n.StartDaemon()
//	pod := n.AddPod("web")                  // by ADD of the real chain
//	testbed.EchoAll(t, 10, 200, pod.Host)   // ten connections, 200 bytes each
package testbed

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"time"

	"github.com/containernetworking/plugins/pkg/ns"
	"golang.org/x/sys/unix"
)

// TB is the part of testing.TB that a testbed uses; the benchmarks have another implementation.
type TB interface {
	Helper()
	Cleanup(func())
	Fatalf(format string, args ...any)
	Logf(format string, args ...any)
	Failed() bool
	TempDir() string
}

// Host is one network namespace.
type Host struct {
	tb   TB
	Name string
}

// Path is where the netns is mounted.
func (h *Host) Path() string { return filepath.Join("/run/netns", h.Name) }

var made atomic.Int64

// NewHost makes a netns with lo up, and removes it when the test ends.
func NewHost(tb TB, role string) *Host {
	tb.Helper()
	h := &Host{tb, fmt.Sprintf("sluice-%d-%d-%s", pid, made.Add(1), role)}
	Run(tb, "ip", "netns", "add", h.Name)
	tb.Cleanup(h.Delete)
	h.IP("link", "set", "lo", "up")
	return h
}

// adoptHost makes a host of the netns at path, which another program has made. When the test ends, the name is removed.
func adoptHost(tb TB, role, path string) *Host {
	tb.Helper()
	h := &Host{tb, fmt.Sprintf("sluice-%d-%d-%s", pid, made.Add(1), role)}
	if err := errors.Join(
		os.WriteFile(h.Path(), nil, 0o600), unix.Mount(path, h.Path(), "", unix.MS_BIND, ""),
	); err != nil {
		tb.Fatalf("the netns of %s: %v", role, err)
	}
	tb.Cleanup(h.Delete)
	return h
}

// Delete removes the netns; a second time is harmless.
func (h *Host) Delete() { _ = exec.Command("ip", "netns", "del", h.Name).Run() }

// Do runs f on a thread in the netns. f starts no goroutines that need the netns.
func (h *Host) Do(f func() error) error {
	return ns.WithNetNSPath(h.Path(), func(ns.NetNS) error { return f() })
}

// IP runs ip(8) in the netns.
func (h *Host) IP(args ...string) {
	h.tb.Helper()
	Run(h.tb, "ip", append([]string{"-n", h.Name}, args...)...)
}

// Exec runs a command in the netns and returns its output. A failure ends the test.
func (h *Host) Exec(name string, args ...string) string {
	h.tb.Helper()
	out, err := h.TryExec(name, args...)
	if err != nil {
		h.tb.Fatalf("%s in %s: %v\n%s", name, h.Name, err, out)
	}
	return out
}

// TryExec is Exec that returns the failure.
func (h *Host) TryExec(name string, args ...string) (string, error) {
	cmd := exec.Command(name, args...)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := h.Start(cmd); err != nil {
		return "", err
	}
	err := cmd.Wait()
	return out.String(), err
}

// Start starts cmd in the netns.
func (h *Host) Start(cmd *exec.Cmd) error { return h.Do(cmd.Start) }

// Dial connects from the netns. The address is literal: nothing is resolved.
func (h *Host) Dial(ctx context.Context, network, address string) (net.Conn, error) {
	var c net.Conn
	err := h.Do(func() (err error) {
		var d net.Dialer // one address: it connects on this thread
		c, err = d.DialContext(ctx, network, address)
		return err
	})
	return c, err
}

// Listen listens in the netns until the test ends.
func (h *Host) Listen(address string) net.Listener {
	h.tb.Helper()
	var l net.Listener
	err := h.Do(func() (err error) {
		l, err = net.Listen("tcp", address)
		return err
	})
	if err != nil {
		h.tb.Fatalf("listening on %s in %s: %v", address, h.Name, err)
	}
	h.tb.Cleanup(func() { _ = l.Close() })
	return l
}

// Serve listens and hands each connection to handle, which need not close it.
func (h *Host) Serve(address string, handle func(net.Conn)) net.Listener {
	h.tb.Helper()
	l := h.Listen(address)
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return // closed: the test has ended
			}
			go func() {
				defer c.Close() //nolint:errcheck // the handler has seen its errors
				handle(c)
			}()
		}
	}()
	return l
}

// Run runs a command; a failure ends the test.
func Run(tb TB, name string, args ...string) string {
	tb.Helper()
	out, err := exec.Command(name, args...).CombinedOutput()
	if err != nil {
		tb.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
	}
	return string(out)
}

// Eventually waits until cond holds, for a minute at most. The failure of one that never does names the event. A busy
// machine needs that long for some events: the kernel removes netns one batch after the other, for all tests, and a
// batch can take 20 seconds.
func Eventually(tb TB, event string, cond func() bool) {
	tb.Helper()
	Within(tb, time.Minute, event, cond)
}

// Within is Eventually with another timeout.
func Within(tb TB, timeout time.Duration, event string, cond func() bool) {
	tb.Helper()
	for deadline := time.Now().Add(timeout); ; time.Sleep(5 * time.Millisecond) {
		if cond() {
			return
		}
		if time.Now().After(deadline) {
			tb.Fatalf("it never happened: %s", event)
		}
	}
}

// Namespaces are the mount namespace and the netns of a process, as /proc shows them: those of its first thread.
func Namespaces(tb TB, pid int) (namespaces []string) {
	tb.Helper()
	for _, kind := range []string{"mnt", "net"} {
		namespace, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/%s", pid, kind))
		if err != nil {
			tb.Fatalf("the namespaces of process %d: %v", pid, err)
		}
		namespaces = append(namespaces, namespace)
	}
	return namespaces
}

// KeepBusy runs endless loops until the test ends, so that the machine has no time for others.
func KeepBusy(tb TB, loops int) {
	tb.Helper()
	for range loops {
		loop := exec.Command("/bin/busybox", "sh", "-c", "while :; do :; done")
		if err := loop.Start(); err != nil {
			tb.Fatalf("an endless loop: %v", err)
		}
		tb.Cleanup(func() {
			_ = loop.Process.Kill() // it runs
			_ = loop.Wait()
		})
	}
}
