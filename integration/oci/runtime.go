package oci

import (
	"context"
	"sync"

	"github.com/containerd/nri/pkg/adaptation"
	"github.com/containerd/nri/pkg/api"
	nrilog "github.com/containerd/nri/pkg/log"

	"github.com/sluice-cni/sluice/integration/testbed"
)

// Runtime is the part of a container runtime that serves NRI: sluiced connects to it as to containerd.
type Runtime struct {
	*adaptation.Adaptation
	tb testbed.TB

	mu      sync.Mutex
	plugins int // that have connected
}

var silence = sync.OnceFunc(func() { nrilog.Set(discard{}) })

// NewRuntime serves NRI at a socket until the test ends.
func NewRuntime(tb testbed.TB, socket string) *Runtime {
	tb.Helper()
	silence()
	r := &Runtime{tb: tb, plugins: -1} // it synchronizes with plugins of its own first
	a, err := adaptation.New("test", "v1.0.0", r.synchronize,
		func(context.Context, []*api.ContainerUpdate) ([]*api.ContainerUpdate, error) { return nil, nil },
		adaptation.WithSocketPath(socket), adaptation.WithPluginPath(tb.TempDir()))
	if err != nil {
		tb.Fatalf("NRI: %v", err)
	}
	r.Adaptation = a
	if err := a.Start(); err != nil {
		tb.Fatalf("NRI: %v", err)
	}
	tb.Cleanup(a.Stop)
	return r
}

func (r *Runtime) synchronize(ctx context.Context, tell adaptation.SyncCB) error {
	_, err := tell(ctx, nil, nil)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.plugins++
	return err
}

// WaitForSluiced waits until sluiced has connected.
func (r *Runtime) WaitForSluiced() {
	r.tb.Helper()
	testbed.Eventually(r.tb, "sluiced connects to the container runtime", func() bool {
		r.BlockPluginSync().Unblock() // the plugin is not between its synchronization and its place in the list
		r.mu.Lock()
		defer r.mu.Unlock()
		return r.plugins > 0
	})
}

// Start makes a container one of a pod: sluiced is asked about it, and told of its start.
func (r *Runtime) Start(c *Container, podUID string) {
	r.tb.Helper()
	pod := &api.PodSandbox{Id: podUID, Uid: podUID}
	described := &api.Container{
		Id: c.ID, PodSandboxId: podUID, Name: "app", Env: c.Spec.Process.Env, Mounts: api.FromOCIMounts(c.Spec.Mounts),
		Hooks: api.FromOCIHooks(c.Spec.Hooks),
	}
	answer, err := r.CreateContainer(context.Background(), &api.CreateContainerRequest{Pod: pod, Container: described})
	if err != nil {
		r.tb.Fatalf("asking sluiced about a container: %v", err)
	}
	c.Adjust(answer.GetAdjust())
	c.Start()
	described.Env = c.Spec.Process.Env
	described.Mounts = api.FromOCIMounts(c.Spec.Mounts)
	started := &api.StartContainerRequest{Pod: pod, Container: described}
	if err := r.StartContainer(context.Background(), started); err != nil {
		r.tb.Fatalf("telling sluiced of a container: %v", err)
	}
}

// discard is the log of NRI.
type discard struct{}

// Debugf implements nri/pkg/log.Logger, as the others do.
func (discard) Debugf(context.Context, string, ...any) {}

// Infof does nothing.
func (discard) Infof(context.Context, string, ...any) {}

// Warnf does nothing.
func (discard) Warnf(context.Context, string, ...any) {}

// Errorf does nothing.
func (discard) Errorf(context.Context, string, ...any) {}
