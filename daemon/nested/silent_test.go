package nested

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-cni/sluice/integration/testbed"
	"github.com/sluice-cni/sluice/plugin/truststore"
)

// mountSilent mounts a FUSE over a folder of the pod whose server answers no request but the first, until the test
// ends.
func (p *pod) mountSilent(folder string) {
	p.t.Helper()
	fuse, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	must(p.t, err)
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // for ever: it is in the pod's mount namespace
		done <- p.mountFUSE(fuse, folder)
	}()
	must(p.t, <-done)
	var serving sync.WaitGroup
	ctx, end := context.WithCancel(context.Background())
	serving.Go(func() {
		if err := serveSilent(ctx, fuse); err != nil {
			p.t.Errorf("serving the FUSE: %v", err)
		}
	})
	p.t.Cleanup(func() {
		end()
		serving.Wait()
		_ = unix.Close(fuse) // all requests fail now
	})
}

func (p *pod) mountFUSE(fuse int, folder string) error {
	namespace, err := os.Open(fmt.Sprintf("/proc/%d/ns/mnt", p.cmd.Process.Pid))
	if err != nil {
		return err
	}
	defer func() { _ = namespace.Close() }() // only entered
	if err := enter(namespace); err != nil {
		return err
	}
	options := fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0", fuse)
	return unix.Mount("silent", filepath.Join(p.root, folder), "fuse", 0, options)
}

// serveSilent reads requests until ctx ends. It answers the first one, without which the kernel sends no others.
func serveSilent(ctx context.Context, fuse int) error {
	for answered := false; ctx.Err() == nil; {
		request := make([]byte, 64<<10)
		_, err := unix.Read(fuse, request)
		switch {
		case errors.Is(err, unix.EAGAIN):
			_, _ = unix.Poll([]unix.PollFd{{Fd: int32(fuse), Events: unix.POLLIN}}, 100) // in milliseconds
		case err != nil:
			return fmt.Errorf("reading a request: %w", err)
		case !answered:
			if _, err := unix.Write(fuse, initAnswer(request)); err != nil {
				return fmt.Errorf("answering: %w", err)
			}
			answered = true
		}
	}
	return nil
}

// initAnswer is the answer to FUSE_INIT: struct fuse_out_header and struct fuse_init_out of linux/fuse.h.
func initAnswer(request []byte) []byte {
	const length = 16 + 64
	answer := make([]byte, length)
	binary.NativeEndian.PutUint32(answer, length)
	copy(answer[8:16], request[8:16])              // its number
	binary.NativeEndian.PutUint32(answer[16:], 7)  // major
	binary.NativeEndian.PutUint32(answer[20:], 31) // minor
	binary.NativeEndian.PutUint32(answer[36:], 4096)
	return answer
}

// TestSilentFileSystem: a file system of a pod that never answers keeps containers of that pod from the CA. They go on,
// those of other pods have the CA, and the engine can end.
func TestSilentFileSystem(t *testing.T) {
	silent, other := newPod(t), newPod(t)
	e := newEngine(t, silent)
	e.Watch(map[uint32]string{silent.netns: "uid", other.netns: "other"})
	e.work.Wait()
	silent.mountSilent("etc/ssl")
	const containers = 2 * maxTurns
	silent.run("for i in {1.." + fmt.Sprint(containers) + "}; do unshare --mount --pid --fork --root=$root " +
		"/bin/sh -c 'echo up >>/out; while :; do sleep 1; done' & done")
	testbed.Eventually(t, "all turns of the pod are taken", func() bool {
		containers := e.of("uid")
		return len(containers) > 0 && len(containers[0].pod.turns) == maxTurns
	})
	other.start(countCA)
	other.wantEnded(1)
	if got := other.output(); got != "1\n" {
		t.Errorf("in another pod the store has the CA %q times, want once", got)
	}
	testbed.Eventually(t, "the containers go on", func() bool {
		return strings.Count(silent.output(), "up\n") == containers
	})
	testbed.Eventually(t, "the containers are unknown, with the reason", func() bool {
		states, _ := e.State("uid")
		unknown := 0
		for _, c := range states {
			if c.State == truststore.Unknown && strings.Contains(c.Note, "respond") {
				unknown++
			}
		}
		return unknown == containers
	})
	e.stop()
}
