package trust

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"time"

	"github.com/sluice-cni/sluice/plugin/files"
	"github.com/sluice-cni/sluice/plugin/truststore"
)

// repairTimeout bounds a repair. The process itself ends after five seconds, unless the kernel holds it.
const repairTimeout = 6 * time.Second

// repair makes a process enter a container and do the work of the hook. It returns when the report is written. At most
// maxRepairs run at a time; the process of a file system that hangs is left behind at the deadline, and does not count.
func (t *Trust) repair(c *container, late bool) error {
	t.repairs <- struct{}{}
	defer func() { <-t.repairs }()
	if !t.runs(c) {
		return errors.New("repairing the container: it has ended")
	}
	args := []string{
		"ca-repair", "--proc", t.config.Proc, "--pid", strconv.Itoa(c.pid), "--container", c.id,
		"--ca", t.files.caPEM(), "--report", t.files.report(c.id),
	}
	if late {
		args = append(args, "--late")
	}
	if c.mounted {
		args = append(args, "--bundle", BundlePath)
	}
	args = append(args, namedArgs(c.named)...)
	cmd := exec.Command(t.config.Plugin, args...) //nolint:noctx // it ends by itself, with its files whole
	cmd.Env = []string{}                          // nothing of the daemon's is of use in a container
	var output bytes.Buffer
	cmd.Stderr = &output
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("repairing the container: %w", err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	select {
	case err := <-ended:
		if err != nil {
			return fmt.Errorf("repairing the container: %w: %s", err, bytes.TrimSpace(output.Bytes()))
		}
		return nil
	case <-time.After(repairTimeout):
		_ = cmd.Process.Kill() // it may have ended, or the kernel holds it
		return fmt.Errorf("repairing the container: its file system does not respond within %s", repairTimeout)
	}
}

// runs reports whether a container is still in the list.
func (t *Trust) runs(c *container) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.containers[c.id] == c
}

// maxReport bounds a report.
const maxReport = 1 << 20

func readReport(path string) (truststore.Report, error) {
	var report truststore.Report
	data, err := files.ReadBounded(path, maxReport)
	if errors.Is(err, os.ErrNotExist) {
		return report, errors.New("the hook has left no report")
	}
	if err == nil {
		err = json.Unmarshal(data, &report)
	}
	if err != nil {
		return report, fmt.Errorf("reading the hook's report: %w", err)
	}
	return report, nil
}
