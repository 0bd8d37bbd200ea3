package trust

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"sync"
	"time"
)

// hookCommand is the first argument of the hook.
const hookCommand = "ca-hook"

// newestFlag is the youngest of the hook's flags that sluiced gives.
const newestFlag = "-named"

// helpTimeout bounds the check of a plugin.
const helpTimeout = time.Second

// hookFile is the plugin binary as this process sees it.
type hookFile struct {
	path string

	mu     sync.Mutex  // guards the fields below
	looked os.FileInfo // at the last check
	usable bool
}

// isUsable reports whether the binary can be run as the hook. The runtime does not start a container whose hook is
// missing or fails, and an older plugin, which a daemon may find before it has installed its own, does not know the
// command or all of its flags.
func (h *hookFile) isUsable() bool {
	info, err := os.Stat(h.path)
	if err != nil || !info.Mode().IsRegular() {
		return false
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.looked == nil || !os.SameFile(h.looked, info) || h.looked.Size() != info.Size() ||
		!h.looked.ModTime().Equal(info.ModTime()) {
		usable, certain := h.knowsCommand()
		if !certain {
			return usable
		}
		h.looked, h.usable = info, usable
	}
	return h.usable
}

// knowsCommand runs the binary. It is not certain if the binary could not be run to its end, as on a busy node.
func (h *hookFile) knowsCommand() (usable, certain bool) {
	ctx, cancel := context.WithTimeout(context.Background(), helpTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, h.path, hookCommand, "--help")
	cmd.Env = []string{}
	help, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	return err == nil && bytes.Contains(help, []byte(newestFlag)),
		err == nil || errors.As(err, &exit) && exit.Exited()
}
