// Package trust makes the containers of captured pods trust the CA of the node's proxy. It is a plugin of the container
// runtime (NRI, github.com/containerd/nri).
//
//	t, err := trust.New(trust.Config{CAFile: …, Dir: "/run/sluice/trust", Hook: …, Plugin: …, Wanted: …, Log: …})
//	go t.Run(ctx)
//	t.Ready(ctx, podUID)  // before the pod's gate opens
//	t.State(podUID)       // for the status, and for the proxy
//
// # A container that is created
//
// The runtime asks about each container (adjust.go). One of a wanted pod gets:
//
//   - an OCI hook, `sluice ca-hook`, which adds the CA to the container's own trust stores (plugin/truststore)
//   - a read-only mount of a folder with the CA, and with public roots and the CA (ca.go)
//   - environment variables that name those files, where the container has none of the same names
//
// Other containers get nothing. The runtime does without an answer when this process is absent, or hangs for two
// seconds: the container is created without the CA.
//
// # A container that runs
//
// After a connect the runtime names all containers. The hook has left a report of each that it has seen; the report has
// a fingerprint of the CA. A container of a wanted pod without a report about the current CA is repaired (repair.go): a
// process enters its mount namespace and does the work of the hook. The environment and the mounts cannot be changed
// any more. A repair that fails is tried again while the container runs.
//
// The hook of a container in a user namespace of its own runs in there, and cannot write into the folder of the
// reports. The repair finds the CA in the stores then, and reports it. The reports belong to root of the node, so no
// container can write one.
//
// # Two daemons
//
// During an upgrade both are plugins of the runtime. It asks one after the other, and shows to the second the container
// as the first has changed it. Neither adds a variable, a mount or a hook that is there already, so they never
// conflict: the runtime would not create the container then.
package trust

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/sluice-cni/sluice/plugin/truststore"
)

// DefaultSocket is the socket at which runtimes serve NRI plugins.
const DefaultSocket = "/var/run/nri/nri.sock"

// Config is the configuration of a Trust.
type Config struct {
	// Socket is the runtime's socket for NRI plugins; empty: DefaultSocket.
	Socket string
	// CAFile has the CA certificates in PEM, and no keys. It may appear and change at any time.
	CAFile string
	// Dir is a folder for the files of this package. It has the same path on the host and for this process, because the
	// runtime mounts from it.
	Dir string
	// Hook is the path of the plugin binary (plugin/) on the host.
	Hook string
	// Plugin is the path of the same file for this process. No hook is added while the file is missing, or does not
	// know the hook.
	Plugin string
	// Proc is the folder of the host's processes; empty: /proc.
	Proc string
	// Wanted reports whether the containers of a pod are to trust the CA. It must not block.
	Wanted func(podUID string) bool
	// Older, if it is not nil, reports whether a pod ran before it was captured.
	Older func(podUID string) bool
	// Served are the UIDs of pods whose connections may have been served before, while this process did not run.
	Served []string
	// Running, if it is not nil, returns the IDs of a pod's running containers by another source than the runtime. It
	// is asked while the connection to the runtime is lost.
	Running func(podUID string) []string
	// Stopping, if it is not nil, reports whether the runtime may be stopping a container now, such as one of a pod
	// that is being deleted. The connection to the runtime waits meanwhile: containerd creates no container on the node
	// from the connection of a plugin until the stop has ended (https://github.com/containerd/containerd/issues/14083).
	Stopping func() bool
	// Changed, if it is not nil, is called after the state of a container in a pod may have changed. It must not
	// block.
	Changed func(podUID string)
	// CAChanged, if it is not nil, is called after the CA has changed. It must not block.
	CAChanged func()
	Log       *slog.Logger
}

// Container is the state of a container that runs.
type Container struct {
	ID    string           `json:"id"`
	Name  string           `json:"name"`
	State truststore.State `json:"state"`
	// Note is the reason for another state than trusted, or a restriction of it.
	Note string `json:"note,omitempty"`
	// Pending is true until the container has been looked at.
	Pending bool `json:"pending,omitempty"`
}

// Pod is the state of a pod's containers.
type Pod struct {
	// State is the worst of the containers' states, and unknown if no container runs.
	State truststore.State `json:"state"`
	// Note says why nothing is known about the containers, if that is so.
	Note       string      `json:"note,omitempty"`
	Containers []Container `json:"containers,omitempty"`
}

// Trust makes the containers of wanted pods trust the CA.
type Trust struct {
	config   Config
	files    *caFiles
	hookFile hookFile
	repairs  chan struct{} // a token for each repair that runs
	// retryPause is the constant of that name, but in tests.
	retryPause time.Duration

	settleOnce sync.Once
	settled    chan struct{} // closed when the containers are known, or are not going to be soon

	mu         sync.Mutex // guards the fields below, and the fields of the containers
	ca         ca
	known      bool   // the runtime has named its containers
	problem    string // the reason why it has not
	missed     string // the last one that was logged
	connected  bool   // the runtime asks about new containers
	containers map[string]*container
	served     map[string]bool // pods whose connections do not wait for Ready any more, by UID
}

const (
	// maxRepairs bounds the repairs at the same time.
	maxRepairs = 2
	// retryPause is the time from a repair that failed to the next one.
	retryPause = time.Minute
	// settleTime bounds the wait for the runtime after the start.
	settleTime = 3 * time.Second
)

// New checks the configuration. Run does the work.
func New(config Config) (*Trust, error) {
	if config.Socket == "" {
		config.Socket = DefaultSocket
	}
	if config.Proc == "" {
		config.Proc = "/proc"
	}
	for name, path := range map[string]string{"CAFile": config.CAFile, "Dir": config.Dir, "Hook": config.Hook} {
		if !filepath.IsAbs(path) {
			return nil, fmt.Errorf("trust: %s %q is not an absolute path", name, path)
		}
	}
	if config.Wanted == nil || config.Log == nil {
		return nil, errors.New("trust: Wanted and Log are needed")
	}
	served := make(map[string]bool)
	for _, uid := range config.Served {
		served[uid] = true
	}
	return &Trust{
		config: config, files: newCAFiles(config.CAFile, config.Dir, config.Log),
		hookFile: hookFile{path: config.Plugin},
		repairs:  make(chan struct{}, maxRepairs), retryPause: retryPause, settled: make(chan struct{}),
		problem: "the container runtime has not been asked yet", containers: make(map[string]*container),
		served: served,
	}, nil
}

// Run serves the runtime and follows the CA until ctx ends. It returns nil: a node without NRI, or without a CA, is not
// an error but a state.
func (t *Trust) Run(ctx context.Context) error {
	defer time.AfterFunc(settleTime, t.settle).Stop()
	t.updateCA()
	t.hookFile.isUsable() // the first look takes some milliseconds, for which no container should wait
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { t.followCA(ctx); return nil })
	group.Go(func() error { t.serveRuntime(ctx); return nil })
	return group.Wait()
}

// settle lets Ready go on.
func (t *Trust) settle() { t.settleOnce.Do(func() { close(t.settled) }) }

// Ready returns when the running containers of the pods have been looked at and, where necessary, repaired. If the
// runtime does not name its containers within three seconds of the start, Ready does not wait for them. The error is
// that of ctx. A pod that becomes wanted while its containers run needs a call of Ready.
func (t *Trust) Ready(ctx context.Context, podUIDs ...string) error {
	select {
	case <-t.settled:
	case <-ctx.Done():
		return ctx.Err()
	}
	for _, done := range t.checkPods(podUIDs) {
		select {
		case <-done:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, uid := range podUIDs {
		t.served[uid] = true
	}
	return nil
}

// State returns the state of a pod's containers.
func (t *Trust) State(podUID string) Pod {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.known {
		return Pod{State: truststore.Unknown, Note: t.problem}
	}
	pod := t.podLocked(podUID)
	if !t.connected && t.config.Running != nil && slices.ContainsFunc(t.config.Running(podUID), t.isNewLocked) {
		pod.State = truststore.Unknown
		pod.Note = "a container was started while the connection to the container runtime was lost"
	}
	return pod
}

// isNewLocked reports whether the runtime has not named a container.
func (t *Trust) isNewLocked(containerID string) bool { return t.containers[containerID] == nil }

// Asked reports whether the runtime asks about new containers, and whether it needs to: not as long as there is no CA.
func (t *Trust) Asked() (asked, needed bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.connected, t.ca.exists()
}

// HasCA reports whether there is a CA.
func (t *Trust) HasCA() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.ca.exists()
}

// changed tells the caller that a pod's state may have changed.
func (t *Trust) changed(podUID string) {
	if t.config.Changed != nil {
		t.config.Changed(podUID)
	}
}
