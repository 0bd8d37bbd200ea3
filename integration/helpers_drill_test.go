package integration

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/sluice-cni/sluice/integration/testbed"
)

// connect makes short connections at the rate until ctx ends; wg has them to the end of each.
func (s *drillScene) connect(ctx context.Context, wg *sync.WaitGroup) {
	tick := time.NewTicker(time.Second / time.Duration(s.size.rate))
	defer tick.Stop()
	for i := 0; ctx.Err() == nil; i++ {
		wg.Go(func() {
			began := time.Now()
			s.count(echo(patience(s.t), s.pods[i%len(s.pods)].Host, echoAddresses[i/len(s.pods)%2], random(100)))
			for took := int64(time.Since(began)); ; {
				if was := s.longest.Load(); was >= took || s.longest.CompareAndSwap(was, took) {
					break
				}
			}
		})
		<-tick.C
	}
}

func (s *drillScene) count(err error) {
	s.made.Add(1)
	switch {
	case err == nil:
	case errors.Is(err, syscall.ECONNREFUSED):
		s.refused.Add(1)
	case errors.Is(err, syscall.ECONNRESET), errors.Is(err, syscall.EPIPE):
		s.reset.Add(1)
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		s.ended.Add(1)
	case strings.Contains(err.Error(), "not what was sent"):
		s.wrong.Add(1)
	default:
		s.t.Logf("a connection: %v", err)
		s.other.Add(1)
	}
}

// stream sends and wants back one block after the other on one connection, or on the next when that has ended.
func (s *drillScene) stream(ctx context.Context, i int) {
	host, address := s.pods[i%len(s.pods)].Host, echoAddresses[i/len(s.pods)%2]
	for ctx.Err() == nil {
		c, err := host.Dial(patience(s.t), "tcp", address)
		if err != nil {
			s.count(err)
			continue
		}
		block, got := random(16<<10), make([]byte, 16<<10)
		for n := uint64(0); err == nil && ctx.Err() == nil; n++ {
			copy(block, strconv.AppendUint(nil, n, 10)) // so that one that comes twice is seen
			_ = c.SetDeadline(time.Now().Add(time.Minute))
			if _, err = c.Write(block); err == nil {
				_, err = io.ReadFull(c, got)
			}
			if err == nil && !bytes.Equal(block, got) {
				s.wrong.Add(1)
			}
			select {
			case <-time.After(20 * time.Millisecond):
			case <-ctx.Done():
			}
		}
		_ = c.Close()
		switch {
		case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
			s.ended.Add(1)
		case err != nil:
			s.streamsReset.Add(1)
		}
	}
}

// quiet waits until nothing of the load is left.
func (s *drillScene) quiet() {
	testbed.Eventually(s.t, "nothing waits, and nothing is open", func() bool {
		left := 0
		for _, p := range s.pods {
			a := s.d.Of(p)
			left += a.Waiting + a.Open
		}
		return left == 0
	})
}

// addPod adds a pod, and a veth that ends in it: the kernel takes away the end on the node when the netns is really
// gone, whoever deletes it, and not while somebody holds a socket or a descriptor of it.
func (s *drillScene) addPod(name string) *testbed.Pod {
	s.t.Helper()
	p := s.newPod(name)
	if err := p.Add(); err != nil {
		s.t.Fatalf("ADD %s: %v", name, describe(err))
	}
	return p
}

// newPod is addPod without ADD.
func (s *drillScene) newPod(name string) *testbed.Pod {
	p := s.n.NewPod(name)
	s.n.IP("link", "add", witness+name, "type", "veth", "peer", "name", "witness", "netns", p.Host.Name)
	return p
}

const witness = "witness-"

// removePod ends a pod as a runtime does.
func (s *drillScene) removePod(p *testbed.Pod) {
	s.t.Helper()
	if err := p.Del(); err != nil {
		s.t.Errorf("DEL %s: %v", p, describe(err))
	}
	p.Delete()
}

// leakedNetns waits for the netns of all pods to go; how many stay is asked for at the end of that.
func (s *drillScene) leakedNetns() (left int) {
	s.t.Helper()
	testbed.Eventually(s.t, "the netns of every pod is gone", func() bool {
		left = strings.Count(s.n.Exec("ip", "-br", "link", "show", "type", "veth"), witness)
		return left == 0
	})
	return left
}

// drillState is what a daemon may leak.
type drillState struct {
	descriptors, goroutines int
	rss                     float64 // MiB
}

func (s *drillScene) state() drillState {
	s.t.Helper()
	c := client(s.n.Host)
	value := func(text, name string) float64 {
		for line := range strings.Lines(text) {
			if v, ok := strings.CutPrefix(line, name+" "); ok {
				f, err := strconv.ParseFloat(strings.TrimSpace(v), 64)
				if err == nil {
					return f
				}
			}
		}
		return 0
	}
	var state drillState
	testbed.Eventually(s.t, "the metrics are served", func() bool { // by the daemon that took over, in a moment
		text, err := get(patience(s.t), c, "http://"+net.JoinHostPort("127.0.0.1", "15090")+"/metrics")
		state = drillState{int(value(text, "process_open_fds")), int(value(text, "go_goroutines")), value(text, "process_resident_memory_bytes") / (1 << 20)}
		return err == nil && state.goroutines > 0
	})
	return state
}
