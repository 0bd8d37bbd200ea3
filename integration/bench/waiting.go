package main

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"regexp"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-cni/sluice/integration/testbed"
	"github.com/sluice-cni/sluice/plugin/attach"
)

// benchWaiting measures the daemon while many connections wait for the upstream, and then the rate of serving them.
func benchWaiting(b *bench) {
	pods, each := 20, 500
	if b.short {
		pods, each = 4, 100
	}
	all := pods * each
	b.tb.must(raiseDescriptors(uint64(all)*3/2), "RLIMIT_NOFILE: each waiting connection is a descriptor here")
	n := b.newNode()
	// The proxy connects to one destination for the captured clients, and again for the explicit ones: it needs many
	// ports.
	n.Exec("sysctl", "-qw", "net.ipv4.ip_local_port_range=1024 65535")
	d := n.StartDaemon()
	var captured, uncaptured []*testbed.Pod
	b.progress("%d pods", pods)
	for i := range pods {
		captured = append(captured, n.AddPod(fmt.Sprint("pod", i)))
		uncaptured = append(uncaptured, b.addUncaptured(n, fmt.Sprint("plain", i)))
	}
	time.Sleep(time.Second) // the daemon finishes the work that the ADDs have caused
	before := b.rss(d.Program)

	b.progress("%d connections", all)
	c := b.newClients(captured, each, netip.AddrPort{})
	c.run(all, "waiting", func() bool { return c.in[asked]+c.in[lost] == all })
	if c.in[lost] > 0 {
		b.progress("  the first refusal: %v", c.failure)
	}
	b.add(measured("waiting", fmt.Sprintf("%d waiting connections: refused", all), float64(c.in[lost]), "").atMost(0))
	b.waitUntilCounted(d, c.in[asked])
	time.Sleep(time.Second)
	during := b.rss(d.Program)
	b.add(measured("waiting", "daemon's memory for each of them", (during-before)/float64(all), "B").atMost(1024).
		beside("before", before/(1<<20), "MiB").beside("while they wait", during/(1<<20), "MiB"))

	proxy := b.startConnectproxy(n)
	start := time.Now()
	c.run(all, "served", func() bool { return c.in[served]+c.in[lost] == all })
	took, rate := time.Since(start), c.rate()
	after := b.rss(d.Program)
	b.add(measured("waiting", "of them served when the proxy comes", float64(c.in[served]), "").atLeast(float64(all)).
		beside("time", took.Seconds(), "s").beside("daemon's memory", after/(1<<20), "MiB").
		beside("proxy's memory", b.rss(proxy)/(1<<20), "MiB"))
	c.close()

	// 64 clients at a time: the daemon passes as many connections at a time to the upstream.
	e := b.newClients(uncaptured, each, proxyOnBridge)
	e.run(64, "served", func() bool { return e.in[served]+e.in[lost] == all })
	if e.in[lost] > 0 {
		b.tb.Fatalf("explicit clients: %v", e.failure)
	}
	e.close()
	b.add(measured("waiting", "rate of serving them, relative to explicit clients", rate/e.rate(), "").atLeast(0.5).
		beside("sluice", rate, "/s").beside("explicit", e.rate(), "/s"))
}

// waitUntilCounted waits until the daemon reports so many waiting connections.
func (b *bench) waitUntilCounted(d *testbed.Daemon, count int) {
	testbed.Eventually(b.tb, fmt.Sprintf("the daemon reports %d waiting connections", count), func() bool {
		return waiting(d.Status()) == count
	})
}

func waiting(s attach.Status) (n int) {
	for _, a := range s.Attachments {
		n += a.Waiting
	}
	return n
}

func raiseDescriptors(want uint64) error {
	var l unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &l); err != nil {
		return err
	}
	l.Cur, l.Max = max(l.Cur, want), max(l.Max, want)
	return unix.Setrlimit(unix.RLIMIT_NOFILE, &l)
}

var vmRSS = regexp.MustCompile(`VmRSS:\s*(\d+) kB`)

// rss returns the resident memory of a program in bytes.
func (b *bench) rss(p *testbed.Program) float64 {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.Pid()))
	b.tb.must(err, "resident memory")
	m := vmRSS.FindSubmatch(data)
	if m == nil {
		b.tb.Fatalf("no VmRSS in %s", data)
	}
	kib, _ := strconv.Atoi(string(m[1]))
	return float64(kib) * 1024
}

// state is the state of one client.
type state int

const (
	unused state = iota
	connecting
	askingProxy // has sent a CONNECT request
	asked       // has sent its message
	served      // has received the response
	lost        // has failed
	states      // number of states
)

// clients are many connections that one thread drives. Each client connects, sends a CONNECT request if there is a
// proxy, sends a message, and closes when the message comes back.
type clients struct {
	b           *bench
	proxy       netip.AddrPort
	epoll       int
	state       map[int]state // by descriptor
	got         map[int][]byte
	next        []int // the unused ones
	in          [states]int
	failure     error     // the first one
	first, last time.Time // the times at which the first and the last client were served
}

// newClients creates the sockets in the netns of the pods. A socket stays in its netns when a thread outside uses it.
func (b *bench) newClients(pods []*testbed.Pod, each int, proxy netip.AddrPort) *clients {
	c := &clients{b: b, proxy: proxy, state: map[int]state{}, got: map[int][]byte{}}
	var err error
	c.epoll, err = unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	b.tb.must(err, "epoll")
	for _, p := range pods {
		b.tb.must(p.Do(func() error {
			for range each {
				fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
				if err != nil {
					return err
				}
				c.next = append(c.next, fd)
			}
			return nil
		}), "sockets")
	}
	return c
}

// run drives the clients, up to atOnce at a time, until done. wanted names the state that they are to reach.
func (c *clients) run(atOnce int, wanted string, done func() bool) {
	events := make([]unix.EpollEvent, 1024)
	for deadline := time.Now().Add(2 * time.Minute); !done(); {
		for len(c.next) > 0 && c.in[connecting]+c.in[askingProxy]+c.in[asked] < atOnce {
			c.start(c.next[0])
			c.next = c.next[1:]
		}
		n, err := unix.EpollWait(c.epoll, events, 1000)
		if err != nil && !errors.Is(err, unix.EINTR) {
			c.b.tb.Fatalf("epoll: %v", err)
		}
		for _, e := range events[:max(n, 0)] {
			fd := int(e.Fd)
			if err := c.goOn(fd); err != nil {
				c.failure = cmp.Or(c.failure, err)
				c.to(fd, lost)
			}
		}
		if time.Now().After(deadline) {
			c.b.tb.Fatalf("not every client is %s: %d connecting, %d asking the proxy, %d waiting, %d served, %d lost",
				wanted, c.in[connecting], c.in[askingProxy], c.in[asked], c.in[served], c.in[lost])
		}
	}
}

func (c *clients) start(fd int) {
	to := server
	if c.proxy.IsValid() {
		to = c.proxy
	}
	err := unix.Connect(fd, sockaddr(to))
	if errors.Is(err, unix.EINPROGRESS) {
		err = nil
	}
	c.b.tb.must(err, "connecting")
	c.to(fd, connecting)
	e := unix.EpollEvent{Fd: int32(fd), Events: unix.EPOLLOUT}
	c.b.tb.must(unix.EpollCtl(c.epoll, unix.EPOLL_CTL_ADD, fd, &e), "epoll")
}

// to changes a client's state, and closes a client that is served or lost.
func (c *clients) to(fd int, s state) {
	if was, is := c.state[fd]; is {
		c.in[was]--
	}
	c.state[fd] = s
	c.in[s]++
	if s == served || s == lost {
		delete(c.state, fd)
		delete(c.got, fd)
		_ = unix.Close(fd) // on a socket, an error of close means no lost data
	}
}

// goOn continues a client's exchange after an event on its socket.
func (c *clients) goOn(fd int) error {
	if c.state[fd] == connecting {
		code, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ERROR)
		if err != nil {
			return err
		}
		if code != 0 {
			return unix.Errno(code)
		}
		e := unix.EpollEvent{Fd: int32(fd), Events: unix.EPOLLIN}
		if err := unix.EpollCtl(c.epoll, unix.EPOLL_CTL_MOD, fd, &e); err != nil {
			return err
		}
		if c.proxy.IsValid() {
			return c.say(fd, connectRequest(server), askingProxy)
		}
		return c.say(fd, message(opEcho, 0), asked)
	}
	b := make([]byte, 1024)
	n, err := unix.Read(fd, b)
	if errors.Is(err, unix.EAGAIN) {
		return nil
	}
	if err != nil {
		return err
	}
	if n == 0 {
		return errors.New("the peer has closed the connection before the response was complete")
	}
	c.got[fd] = append(c.got[fd], b[:n]...)
	switch {
	case c.state[fd] == askingProxy && bytes.HasSuffix(c.got[fd], endOfHeader):
		if !bytes.HasPrefix(c.got[fd], connected) {
			return fmt.Errorf("the proxy responds %q", c.got[fd])
		}
		c.got[fd] = nil
		return c.say(fd, message(opEcho, 0), asked)
	case c.state[fd] == asked && len(c.got[fd]) >= messageSize:
		if c.last = time.Now(); c.first.IsZero() {
			c.first = c.last
		}
		c.to(fd, served)
	}
	return nil
}

// say sends a short message, which fits into the socket's send buffer, and changes the client's state.
func (c *clients) say(fd int, message []byte, then state) error {
	if _, err := unix.Write(fd, message); err != nil {
		return err
	}
	c.to(fd, then)
	return nil
}

// rate returns the number of clients served per second, from the first to the last.
func (c *clients) rate() float64 {
	return float64(c.in[served]-1) / c.last.Sub(c.first).Seconds()
}

func (c *clients) close() { _ = unix.Close(c.epoll) }
