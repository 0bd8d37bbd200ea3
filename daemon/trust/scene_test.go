package trust

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/nri/pkg/adaptation"
	"github.com/containerd/nri/pkg/api"
	nrilog "github.com/containerd/nri/pkg/log"

	"github.com/sluice-cni/sluice/integration/pki"
	"github.com/sluice-cni/sluice/integration/testbed"
	"github.com/sluice-cni/sluice/plugin/truststore"
)

func TestMain(m *testing.M) {
	nrilog.Set(logger{slog.New(slog.DiscardHandler)}) // the runtime's side
	os.Exit(m.Run())
}

// scene is a folder with a CA, a plugin and the socket of a runtime.
type scene struct {
	t   *testing.T
	dir string
	log *testbed.Log
	ca  []byte

	older string // the pod that ran before it was captured

	mu      sync.Mutex
	wanted  map[string]bool
	changed map[string]int
}

func newScene(t *testing.T, wanted ...string) *scene {
	t.Helper()
	dir, err := os.MkdirTemp("", "trust") //nolint:usetesting // the path of a socket is short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	s := &scene{t: t, dir: dir, log: &testbed.Log{}, wanted: make(map[string]bool), changed: make(map[string]int)}
	for _, id := range wanted {
		s.wanted[id] = true
	}
	for _, folder := range []string{"ca", "run"} {
		s.must(os.Mkdir(s.path(folder), 0o755))
	}
	s.write("roots.crt", string(pki.NewCA("public root").Cert))
	s.plugin("")
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("log:\n%s", s.log)
		}
	})
	return s
}

func (s *scene) path(name string) string { return filepath.Join(s.dir, name) }

func (s *scene) must(err error) {
	s.t.Helper()
	if err != nil {
		s.t.Fatal(err)
	}
}

func (s *scene) write(name, contents string) {
	s.t.Helper()
	s.must(os.WriteFile(s.path(name), []byte(contents), 0o644))
}

func (s *scene) read(name string) string {
	s.t.Helper()
	data, err := os.ReadFile(s.path(name))
	s.must(err)
	return string(data)
}

// setCA writes a CA as a ConfigMap's volume changes: the link to the folder with the data is renamed.
func (s *scene) setCA(ca []byte) {
	s.t.Helper()
	s.ca = ca
	data, err := os.MkdirTemp(s.path("ca"), "..data-")
	s.must(err)
	s.must(os.WriteFile(filepath.Join(data, "ca.pem"), ca, 0o644))
	s.must(os.Symlink(filepath.Base(data), s.path("ca/..new")))
	s.write("good.json", s.report(ca, truststore.Trusted)) // a repair may begin as soon as the CA is there
	s.must(os.Rename(s.path("ca/..new"), s.path("ca/..data")))
	if _, err := os.Lstat(s.path("ca/ca.pem")); os.IsNotExist(err) {
		s.must(os.Symlink("..data/ca.pem", s.path("ca/ca.pem")))
	}
}

// report is a report about a CA.
func (s *scene) report(ca []byte, state truststore.State) string {
	s.t.Helper()
	fingerprints, err := truststore.Fingerprints(ca)
	s.must(err)
	data, err := json.Marshal(truststore.Report{State: state, CA: fingerprints})
	s.must(err)
	return string(data)
}

// plugin writes a plugin whose repairs write the report good.json. It first does what the commands say; $pid and
// $report are those of the call.
func (s *scene) plugin(commands string) {
	s.t.Helper()
	script := fmt.Sprintf(`#!/bin/sh
[ "$*" = "ca-hook --help" ] && echo -named && exit
cd %s
while [ $# -gt 0 ]; do
	case $1 in --report) report=$2 ;; --pid) pid=$2 ;; --late) late='"late":true,' ;; esac
	shift
done
%s
echo "$pid" >>repaired
sed "s/{/{$late/" good.json >"$report.new" && mv "$report.new" "$report"
`, s.dir, commands)
	s.must(os.WriteFile(s.path("plugin.new"), []byte(script), 0o755))
	s.must(os.Rename(s.path("plugin.new"), s.path("plugin")))
}

// repaired are the PIDs of the repairs that have ended, each in a line.
func (s *scene) repaired() string {
	data, _ := os.ReadFile(s.path("repaired")) // none: no repair
	return string(data)
}

func (s *scene) config() Config {
	return Config{
		Socket: s.path("nri.sock"), CAFile: s.path("ca/ca.pem"), Dir: s.path("run"),
		Hook: "/opt/cni/bin/sluice", Plugin: s.path("plugin"),
		Older: func(uid string) bool { return uid == s.older },
		Wanted: func(id string) bool {
			s.mu.Lock()
			defer s.mu.Unlock()
			return s.wanted[id]
		},
		Changed: func(id string) {
			s.mu.Lock()
			defer s.mu.Unlock()
			s.changed[id]++
		},
		Log: slog.New(slog.NewTextHandler(s.log, nil)),
	}
}

func (s *scene) want(id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.wanted[id] = true
}

// newTrust makes a Trust that does not run.
func (s *scene) newTrust() *Trust {
	s.t.Helper()
	trust, err := New(s.config())
	s.must(err)
	trust.files.roots = []string{s.path("roots.crt")}
	return trust
}

// start runs a Trust until the test ends, or until stop is called.
func (s *scene) start() (trust *Trust, stop func()) {
	s.t.Helper()
	trust = s.newTrust()
	return trust, s.run(trust)
}

// run runs a Trust until the test ends, or until stop is called.
func (s *scene) run(trust *Trust) (stop func()) {
	s.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- trust.Run(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-ended; err != nil {
			s.t.Errorf("Run: %v", err)
		}
	})
	s.t.Cleanup(stop)
	return stop
}

// ready waits until the containers of some pods have been looked at.
func (s *scene) ready(trust *Trust, pods ...string) {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	s.must(trust.Ready(ctx, pods...))
}

func (s *scene) wantState(trust *Trust, uid string, state truststore.State, note string) {
	s.t.Helper()
	pod := trust.State(uid)
	data, err := json.Marshal(pod)
	s.must(err)
	if pod.State != state || !strings.Contains(string(data), note) {
		s.t.Errorf("got %s, want the state %s and the note %q", data, state, note)
	}
}

// eventually waits up to a minute for a condition.
func (s *scene) eventually(wanted string, cond func() bool) {
	s.t.Helper()
	for deadline := time.Now().Add(time.Minute); !cond(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			s.t.Fatalf("timed out waiting for: %s", wanted)
		}
	}
}

// runtime is the runtime's side of NRI, behind a relay whose connections a test can end: the library cannot.
type runtime struct {
	*adaptation.Adaptation
	s          *scene
	relay      net.Listener
	mu         sync.Mutex
	containers []*api.Container
	plugins    int // that have been synchronized
	conns      []net.Conn
}

// newRuntime starts a runtime with some containers that run.
func (s *scene) newRuntime(containers ...*api.Container) *runtime {
	s.t.Helper()
	r := &runtime{s: s, containers: containers, plugins: -1} // it synchronizes with those of its own first
	a, err := adaptation.New("test", "v1.0.0", r.synchronize,
		func(context.Context, []*api.ContainerUpdate) ([]*api.ContainerUpdate, error) { return nil, nil },
		adaptation.WithSocketPath(s.path("runtime.sock")), adaptation.WithPluginPath(s.path("none")))
	s.must(err)
	r.Adaptation = a
	s.must(a.Start())
	r.relay, err = net.Listen("unix", s.path("nri.sock"))
	s.must(err)
	go r.serve()
	s.t.Cleanup(r.crash)
	return r
}

// serve relays connections until the listener is closed.
func (r *runtime) serve() {
	for {
		from, err := r.relay.Accept()
		if err != nil {
			return
		}
		to, err := net.Dial("unix", r.s.path("runtime.sock"))
		if err != nil {
			_ = from.Close()
			continue
		}
		r.mu.Lock()
		r.conns = append(r.conns, from, to)
		r.mu.Unlock()
		for _, pair := range [][2]net.Conn{{from, to}, {to, from}} {
			go func() {
				_, _ = io.Copy(pair[0], pair[1])
				_ = pair[0].Close()
			}()
		}
	}
}

func (r *runtime) synchronize(ctx context.Context, tell adaptation.SyncCB) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	var pods []*api.PodSandbox
	for _, c := range r.containers {
		pods = append(pods, sandbox(c))
	}
	_, err := tell(ctx, pods, r.containers)
	r.plugins++
	return err
}

// crash ends the runtime and its connections.
func (r *runtime) crash() {
	r.Stop()
	_ = r.relay.Close()
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, c := range r.conns {
		_ = c.Close()
	}
}

// waitFor waits until the runtime asks a number of plugins.
func (r *runtime) waitFor(plugins int) {
	r.s.t.Helper()
	r.s.eventually(fmt.Sprintf("%d plugins", plugins), func() bool {
		r.BlockPluginSync().Unblock() // none is between its synchronization and its place in the list
		r.mu.Lock()
		defer r.mu.Unlock()
		return r.plugins >= plugins
	})
}

// sandbox is the sandbox of a container. In these tests its pod has the ID of the sandbox as its UID.
func sandbox(c *api.Container) *api.PodSandbox {
	return &api.PodSandbox{Id: c.PodSandboxId, Uid: c.PodSandboxId}
}

// create asks the plugins about a container, and returns their adjustment.
func (r *runtime) create(c *api.Container) *api.ContainerAdjustment {
	r.s.t.Helper()
	response, err := r.CreateContainer(context.Background(), &api.CreateContainerRequest{
		Pod: sandbox(c), Container: c,
	})
	r.s.must(err)
	return response.Adjust
}

// begin says that a container starts.
func (r *runtime) begin(c *api.Container) {
	r.s.t.Helper()
	r.s.must(r.StartContainer(context.Background(), &api.StartContainerRequest{
		Pod: sandbox(c), Container: c,
	}))
}

// running is a container that runs in the sandbox with the same ID, with the variables of NRI.
func running(id string, pid uint32) *api.Container {
	return &api.Container{
		Id: id, PodSandboxId: id, Name: "app", State: api.ContainerState_CONTAINER_RUNNING, Pid: pid,
		Env: []string{"NODE_EXTRA_CA_CERTS=" + CAPath},
	}
}
