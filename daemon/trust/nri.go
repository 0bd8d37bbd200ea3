package trust

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"time"

	"github.com/containerd/nri/pkg/api"
	"github.com/containerd/nri/pkg/stub"

	"github.com/sluice-cni/sluice/daemon/pause"
)

const (
	// pluginName and pluginIndex name the plugin to the runtime, which asks plugins in the order of their indexes: the
	// last one sees the variables that the others have added.
	pluginName  = "sluice"
	pluginIndex = "99"
	// registerTimeout bounds the time from the connect to the runtime's list of containers.
	registerTimeout = 10 * time.Second
	// minRetry and maxRetry bound the pause before the next connect.
	minRetry = 100 * time.Millisecond
	maxRetry = 2 * time.Second
)

// serveRuntime serves the runtime, and connects again whenever the connection ends: the runtime restarts, or has waited
// too long for an answer.
func (t *Trust) serveRuntime(ctx context.Context) {
	retry := minRetry
	for ctx.Err() == nil {
		was := t.isKnown()
		connected, err := t.serveOnce(ctx)
		t.mu.Lock()
		t.connected = false
		t.mu.Unlock()
		if ctx.Err() != nil {
			return
		}
		if connected {
			t.config.Log.Warn("the connection to the container runtime (NRI) is lost", "err", err)
			retry = minRetry
		} else if !was {
			t.missRuntime(err)
		}
		_ = pause.For(ctx, retry) // the loop ends with ctx
		retry = min(2*retry, maxRetry)
	}
}

func (t *Trust) isKnown() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.known
}

// missRuntime says once why the runtime does not name its containers, if there is a CA to be given to them.
func (t *Trust) missRuntime(err error) {
	problem, absent := err.Error(), errors.Is(err, fs.ErrNotExist)
	if absent {
		problem = fmt.Sprintf("the container runtime has no NRI socket at %s: enable NRI in its configuration "+
			"(containerd 1.7: [plugins.\"io.containerd.nri.v1.nri\"] disable = false)", t.config.Socket)
	}
	t.mu.Lock()
	t.problem = problem
	news := problem != t.missed && t.ca.exists() // without a CA there is nothing to miss
	if news {
		t.missed = problem
	}
	t.mu.Unlock()
	if absent {
		t.settle() // nothing is to be expected
	}
	if news {
		t.config.Log.Warn("containers are not made to trust the proxy's CA", "err", problem)
	}
}

// serveOnce serves one connection until it ends. It was connected if the runtime has named its containers.
func (t *Trust) serveOnce(ctx context.Context) (connected bool, err error) {
	if t.config.Stopping != nil && t.config.Stopping() {
		return false, errStopping
	}
	conn, err := (&net.Dialer{}).DialContext(ctx, "unix", t.config.Socket)
	if err != nil {
		return false, fmt.Errorf("connecting to the container runtime: %w", err)
	}
	defer func() { _ = conn.Close() }() // the stub reports errors of the connection
	p := &plugin{trust: t, synchronized: make(chan struct{})}
	s, err := stub.New(p, stub.WithConnection(conn), stub.WithPluginName(pluginName), stub.WithPluginIdx(pluginIndex),
		stub.WithLogger(logger{t.config.Log}))
	if err != nil {
		return false, fmt.Errorf("registering with the container runtime: %w", err)
	}
	// The stub waits for ever, and is left behind, if the runtime ends between the registration and the configuration.
	ended := make(chan error, 1)
	go func() { ended <- s.Run(ctx) }()
	select {
	case err := <-ended:
		return p.isSynchronized(), fmt.Errorf("registering with the container runtime: %w", closed(err))
	case <-time.After(registerTimeout):
		return false, fmt.Errorf("registering with the container runtime: no answer within %s", registerTimeout)
	case <-ctx.Done():
		return false, ctx.Err()
	case <-p.synchronized:
	}
	select {
	case err := <-ended:
		return true, closed(err)
	case <-ctx.Done():
		return true, ctx.Err()
	}
}

// errStopping is the reason for no connection while the runtime stops a container.
var errStopping = errors.New("the container runtime stops a container; the connection waits for that")

// closed is the error of a connection that has ended.
func closed(err error) error {
	if err == nil {
		return errors.New("the runtime has closed the connection")
	}
	return err
}

// plugin answers the runtime on one connection. The runtime waits for each answer, and creates no other container
// meanwhile, so none takes long.
type plugin struct {
	trust        *Trust
	synchronized chan struct{} // closed when the runtime has named its containers
}

func (p *plugin) isSynchronized() bool {
	select {
	case <-p.synchronized:
		return true
	default:
		return false
	}
}

// Synchronize implements stub.SynchronizeInterface: the runtime names its containers.
func (p *plugin) Synchronize(
	_ context.Context, pods []*api.PodSandbox, containers []*api.Container,
) ([]*api.ContainerUpdate, error) {
	p.trust.replaceAll(pods, containers)
	p.trust.config.Log.Info("connected to the container runtime (NRI)", "containers", len(containers))
	close(p.synchronized)
	return nil, nil
}

// CreateContainer implements stub.CreateContainerInterface.
func (p *plugin) CreateContainer(
	_ context.Context, pod *api.PodSandbox, c *api.Container,
) (*api.ContainerAdjustment, []*api.ContainerUpdate, error) {
	if !p.trust.config.Wanted(pod.GetUid()) {
		return nil, nil, nil
	}
	return p.trust.adjustment(c), nil, nil
}

// StartContainer implements stub.StartContainerInterface: the container is there with its hooks run, and its process
// has not started.
func (p *plugin) StartContainer(_ context.Context, pod *api.PodSandbox, c *api.Container) error {
	p.trust.start(p.trust.newContainer(pod.GetUid(), c))
	return nil
}

// StopContainer implements stub.StopContainerInterface. It is called after a container has ended by itself, too.
func (p *plugin) StopContainer(_ context.Context, _ *api.PodSandbox, c *api.Container) ([]*api.ContainerUpdate, error) {
	p.trust.stop(c.GetId())
	return nil, nil
}

// RemovePodSandbox implements stub.RemovePodInterface.
func (p *plugin) RemovePodSandbox(_ context.Context, pod *api.PodSandbox) error {
	p.trust.removePod(pod.GetUid())
	return nil
}

// RemoveContainer implements stub.RemoveContainerInterface.
func (p *plugin) RemoveContainer(_ context.Context, _ *api.PodSandbox, c *api.Container) error {
	p.trust.stop(c.GetId())
	p.trust.removeReport(c.GetId())
	return nil
}

// logger writes the stub's messages at the level DEBUG: administrators need those of this package only.
type logger struct{ log *slog.Logger }

// Debugf implements nri/pkg/log.Logger.
func (l logger) Debugf(ctx context.Context, format string, args ...any) {
	l.log.DebugContext(ctx, "NRI", "message", fmt.Sprintf(format, args...))
}

// Infof implements nri/pkg/log.Logger.
func (l logger) Infof(ctx context.Context, format string, args ...any) {
	l.Debugf(ctx, format, args...)
}

// Warnf implements nri/pkg/log.Logger.
func (l logger) Warnf(ctx context.Context, format string, args ...any) {
	l.Debugf(ctx, format, args...)
}

// Errorf implements nri/pkg/log.Logger.
func (l logger) Errorf(ctx context.Context, format string, args ...any) {
	l.Debugf(ctx, format, args...)
}
