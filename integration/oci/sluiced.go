package oci

import (
	"encoding/json"
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"

	"github.com/containerd/nri/pkg/api"

	"github.com/sluice-cni/sluice/daemon/trust"
	"github.com/sluice-cni/sluice/integration/testbed"
	"github.com/sluice-cni/sluice/plugin/truststore"
)

// Sluiced is the part of sluiced that is an NRI plugin, on a node whose proxy has a CA. Every pod is captured.
type Sluiced struct {
	tb     testbed.TB
	trust  *trust.Trust
	dir    string
	plugin string
}

// NewSluiced writes the files of the CA into a folder. plugin is the binary that has the hook. The root of a user
// namespace must be able to reach both.
func NewSluiced(tb testbed.TB, dir, plugin string, ca []byte) *Sluiced {
	tb.Helper()
	caFile := filepath.Join(dir, "ca.pem")
	if err := os.WriteFile(caFile, ca, 0o600); err != nil {
		tb.Fatalf("the CA: %v", err)
	}
	t, err := trust.New(trust.Config{
		CAFile: caFile, Dir: filepath.Join(dir, "trust"), Hook: plugin, Plugin: plugin,
		Wanted: func(string) bool { return true }, Log: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		tb.Fatalf("%v", err)
	}
	return &Sluiced{tb: tb, trust: t, dir: dir, plugin: plugin}
}

// Adjustment returns the additions to a container.
func (s *Sluiced) Adjustment(c *Container) *api.ContainerAdjustment {
	return s.trust.Adjustment(&api.Container{
		Id: c.ID, Env: c.Spec.Process.Env, Mounts: api.FromOCIMounts(c.Spec.Mounts),
		Hooks: api.FromOCIHooks(c.Spec.Hooks),
	})
}

// Repair repairs a container that runs, with more arguments, and returns the report.
func (s *Sluiced) Repair(c *Container, args ...string) truststore.Report {
	s.tb.Helper()
	cmd := exec.Command(s.plugin, append([]string{
		"ca-repair", "--pid", strconv.Itoa(c.PID()), "--container", c.ID, "--report", s.report(c),
		"--ca", filepath.Join(s.dir, "trust", "ca.pem"), "--bundle", trust.BundlePath,
	}, args...)...)
	if out, err := cmd.CombinedOutput(); err != nil {
		s.tb.Fatalf("repairing the container: %v\n%s", err, out)
	}
	return s.Report(c)
}

func (s *Sluiced) report(c *Container) string {
	return filepath.Join(s.dir, "trust", "reports", c.ID+".json")
}

// Report is the report about a container by the hook or by a repair. Without one the state is unknown.
func (s *Sluiced) Report(c *Container) truststore.Report {
	s.tb.Helper()
	data, err := os.ReadFile(s.report(c))
	if errors.Is(err, fs.ErrNotExist) {
		return truststore.Report{State: truststore.Unknown}
	}
	var report truststore.Report
	if err == nil {
		err = json.Unmarshal(data, &report)
	}
	if err != nil {
		s.tb.Fatalf("the report of the hook: %v", err)
	}
	return report
}
