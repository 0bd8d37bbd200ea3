package drill

import (
	"bytes"
	"context"
	"errors"
	"io"
	"strconv"

	"sync"
	"syscall"
	"time"

	"github.com/sluice-cni/sluice/integration/testbed"
)

// connect makes short connections at the rate of the drill until ctx ends. wg waits for the end of each.
func (s *drillScene) connect(ctx context.Context, wg *sync.WaitGroup) {
	tick := time.NewTicker(time.Second / time.Duration(s.size.rate))
	defer tick.Stop()
	for i := 0; ctx.Err() == nil; i++ {
		wg.Go(func() {
			s.begun.Add(1)
			defer s.finished.Add(1)
			began := time.Now()
			host, address := s.pods[i%len(s.pods)].Host, testbed.EchoAddresses[i/len(s.pods)%2]
			s.count(testbed.Echo(testbed.Context(s.t), host, address, testbed.RandomBytes(100)))
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
	case errors.Is(err, testbed.ErrWrongEcho):
		s.wrong.Add(1)
	default:
		s.t.Logf("a connection: %v", err)
		s.other.Add(1)
	}
}

// stream sends one block after the other on one connection and reads each back. When the connection ends it opens
// another.
func (s *drillScene) stream(ctx context.Context, i int) {
	host, address := s.pods[i%len(s.pods)].Host, testbed.EchoAddresses[i/len(s.pods)%2]
	for ctx.Err() == nil {
		s.begun.Add(1)
		c, err := host.Dial(testbed.Context(s.t), "tcp", address)
		if err != nil {
			s.count(err)
			s.finished.Add(1)
			continue
		}
		block, got := testbed.RandomBytes(16<<10), make([]byte, 16<<10)
		for n := uint64(0); err == nil && ctx.Err() == nil; n++ {
			copy(block, strconv.AppendUint(nil, n, 10)) // shows a block that comes twice
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
		s.finished.Add(1)
		switch {
		case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
			s.ended.Add(1)
		case err != nil:
			s.streamsReset.Add(1)
		}
	}
}

// quiet waits until no connection of the load is left.
func (s *drillScene) quiet() {
	testbed.Eventually(s.t, "no connection waits or is open, and every pod is watched", func() bool {
		left := 0
		for _, p := range s.pods {
			a := s.d.Of(p)
			left += a.Waiting + a.Open
			if a.Wall == "" { // its record is not read yet, and its netns not watched
				left++
			}
		}
		return left == 0
	})
}
