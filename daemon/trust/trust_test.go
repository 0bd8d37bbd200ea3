package trust

import (
	"context"
	"encoding/json"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/containerd/nri/pkg/api"

	"github.com/sluice-cni/sluice/integration/pki"
	"github.com/sluice-cni/sluice/plugin/truststore"
)

// TestHookReport: the state of a container that starts is known before its process runs, by the hook's report.
func TestHookReport(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name, note string
		report     truststore.State
		equipped   bool
	}{
		{name: "trusted", report: truststore.Trusted, equipped: true},
		{name: "without variables", report: truststore.Trusted, note: "until the container starts anew"},
		{name: "one store failed", report: truststore.FilesOnly, equipped: true, note: "start it anew"},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			s := newScene(t, "pod")
			s.setCA(pki.NewCA("proxy").Cert)
			r := s.newRuntime()
			trust, _ := s.start()
			r.waitFor(1)
			s.wantState(trust, "pod", truststore.Unknown, "no container runs")
			c := running("pod", 4242)
			if !test.equipped {
				c.Env = nil
			}
			s.write("run/reports/pod.json", s.report(s.ca, test.report))
			r.begin(c)
			s.wantState(trust, "pod", test.report, test.note)
			if got := s.repaired(); got != "" {
				t.Errorf("repaired: got %q, want no repair", got)
			}
			if s.changed["pod"] == 0 {
				t.Error("Changed was not called")
			}
			s.must(r.RemoveContainer(t.Context(), &api.RemoveContainerRequest{
				Pod: &api.PodSandbox{Id: "pod"}, Container: c,
			}))
			s.wantState(trust, "pod", truststore.Unknown, "no container runs")
			if _, err := os.Stat(s.path("run/reports/pod.json")); !os.IsNotExist(err) {
				t.Errorf("the report of a container that is gone: got %v, want none", err)
			}
		})
	}
}

// TestRepair: a container without a good report is repaired before Ready returns, whatever is wrong with the report.
func TestRepair(t *testing.T) {
	t.Parallel()
	for name, report := range map[string]func(s *scene) string{
		"none":             nil,
		"of another CA":    func(s *scene) string { return s.report(pki.NewCA("other").Cert, truststore.Trusted) },
		"with an error":    func(*scene) string { return `{"state":"unknown","error":"deadline exceeded"}` },
		"that is no JSON":  func(*scene) string { return "{" },
		"without contents": func(*scene) string { return "" },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newScene(t, "pod")
			s.setCA(pki.NewCA("proxy").Cert)
			s.must(os.Mkdir(s.path("run/reports"), 0o700))
			s.write("run/reports/gone.json", "{}")
			if report != nil {
				s.write("run/reports/pod.json", report(s))
			}
			s.newRuntime(running("pod", 4242), running("other", 4343))
			trust, _ := s.start()
			s.ready(trust, "pod", "other")
			s.wantState(trust, "pod", truststore.Trusted, "app")
			s.wantState(trust, "other", truststore.Unknown, "not looked at")
			if got := s.repaired(); got != "4242\n" {
				t.Errorf("repaired: got %q, want the wanted pod's container", got)
			}
			if _, err := os.Stat(s.path("run/reports/gone.json")); !os.IsNotExist(err) {
				t.Errorf("the report of a container that is gone: got %v, want none", err)
			}
			s.want("other") // while it runs, and its connections do not wait
			s.ready(trust, "other")
			s.wantState(trust, "other", truststore.Unknown, "given the CA while it ran")
		})
	}
}

// TestLateRepairs: a container that may have connected before it was given the CA stays unknown, also under a new CA.
// One that was given a CA in time stays trusted.
func TestLateRepairs(t *testing.T) {
	t.Parallel()
	s := newScene(t, "older", "in time")
	s.older = "older"
	s.setCA(pki.NewCA("proxy").Cert)
	s.newRuntime(running("older", 4242), running("in time", 4343))
	trust, _ := s.start()
	s.ready(trust, "older", "in time")
	for _, ca := range []string{"", "the next"} {
		if ca != "" {
			s.setCA(pki.NewCA(ca).Cert)
			s.eventually("both are given the next CA", func() bool { return strings.Count(s.repaired(), "\n") == 4 })
			s.ready(trust, "older", "in time")
		}
		s.wantState(trust, "older", truststore.Unknown, "given the CA while it ran")
		s.wantState(trust, "in time", truststore.Trusted, "app")
	}
}

// TestFailedRepairs: a repair that fails, or hangs, leaves its own container unknown and the others trusted; two run at
// a time.
func TestFailedRepairs(t *testing.T) {
	t.Parallel()
	s := newScene(t, "fails", "says", "hangs", "a", "b", "c")
	s.setCA(pki.NewCA("proxy").Cert)
	s.plugin(`mkdir slot-$$
set -- slot-*
[ $# -le 2 ] || touch too-many
case $pid in
1) rmdir slot-$$; echo "sorry, not today" >&2; exit 1 ;;
2) rmdir slot-$$; echo '{"state":"unknown","error":"no space left"}' >"$report"; exit ;;
3) exec sleep 1000 ;;
esac
rmdir slot-$$`)
	s.newRuntime(running("fails", 1), running("says", 2), running("hangs", 3), running("a", 4), running("b", 5),
		running("c", 6))
	trust, _ := s.start()
	s.ready(trust, "fails", "says", "hangs", "a", "b", "c")
	s.wantState(trust, "fails", truststore.Unknown, "sorry, not today")
	s.wantState(trust, "says", truststore.Unknown, "no space left")
	s.wantState(trust, "hangs", truststore.Unknown, "does not respond within 6s")
	for _, id := range []string{"a", "b", "c"} {
		s.wantState(trust, id, truststore.Trusted, "app")
	}
	if _, err := os.Stat(s.path("too-many")); err == nil {
		t.Error("more than two repairs ran at a time")
	}
}

// TestRetry: a repair that failed is tried again, after a pause, and logged once for each reason.
func TestRetry(t *testing.T) {
	t.Parallel()
	s := newScene(t, "pod")
	s.setCA(pki.NewCA("proxy").Cert)
	s.plugin(`echo >>tries; [ -e mended ] || { echo "no space left" >&2; exit 1; }`)
	s.newRuntime(running("pod", 4242))
	trust := s.newTrust()
	trust.retryPause = time.Hour
	s.run(trust)
	for range 3 {
		s.ready(trust, "pod")
		s.wantState(trust, "pod", truststore.Unknown, "no space left")
	}
	if got := s.read("tries"); got != "\n" {
		t.Errorf("got %d repairs before the pause has passed, want 1", len(got))
	}
	trust.mu.Lock()
	trust.retryPause = 0
	trust.containers["pod"].next = time.Now()
	trust.mu.Unlock()
	for range 3 {
		s.ready(trust, "pod")
	}
	if got, logged := s.read("tries"), s.log.Count("is not repaired"); got != "\n\n\n\n" || logged != 1 {
		t.Errorf("got %d repairs and %d lines about them, want 4 and 1", len(got), logged)
	}
	s.write("mended", "")
	trust.Check()
	s.eventually("the container is repaired, late", func() bool { return isLate(trust) })
	s.ready(trust, "pod")
	if got := s.read("tries"); len(got) != 5 {
		t.Errorf("got %d repairs, want none after the one that succeeded", len(got))
	}
}

// TestRotation: a changed CA reaches the files and the containers that run, and a file that is no CA changes nothing.
func TestRotation(t *testing.T) {
	t.Parallel()
	s := newScene(t, "pod")
	first, second := pki.NewCA("first").Cert, pki.NewCA("second").Cert
	s.newRuntime(running("pod", 4242))
	trust, stop := s.start()
	s.eventually("the container is known", func() bool {
		containers := trust.State("pod").Containers
		return len(containers) == 1 && strings.Contains(containers[0].Note, "ca.pem does not exist")
	})
	if _, err := os.Stat(s.path("run/ca.pem")); !os.IsNotExist(err) {
		t.Errorf("the CA for the hook: got %v, want none", err)
	}
	trusted := func(ca []byte) func() bool {
		return func() bool {
			data, _ := os.ReadFile(s.path("run/reports/pod.json")) // none yet
			return string(data) == s.report(ca, truststore.Trusted) && trust.State("pod").State == truststore.Trusted
		}
	}
	s.setCA(first)
	s.eventually("the first CA is trusted", trusted(first))
	s.setCA(append([]byte("# a comment\n"), second...))
	s.eventually("the second CA is trusted", trusted(second))
	roots := s.read("roots.crt")
	for name, want := range map[string]string{
		"run/ca.pem": string(second), "run/files/ca.crt": string(second),
		"run/files/roots/bundle.crt": roots + string(second),
	} {
		if got := s.read(name); got != want {
			t.Errorf("%s: got %s, want %s", name, got, want)
		}
		info, err := os.Stat(s.path(name))
		s.must(err)
		if info.Mode().Perm() != 0o644 {
			t.Errorf("%s: got the mode %o, want 644", name, info.Mode().Perm())
		}
	}
	data, err := filepath.EvalSymlinks(s.path("ca/..data"))
	s.must(err)
	key := "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"
	s.must(os.WriteFile(filepath.Join(data, "ca.pem"), []byte(key), 0o600))
	s.must(os.WriteFile(s.path("ca/touched"), nil, 0o600))
	s.eventually("the key is refused", func() bool { return s.log.Count("PRIVATE KEY") == 1 })
	s.wantState(trust, "pod", truststore.Trusted, "app")
	stop()

	s.must(os.Remove(s.path("ca/ca.pem"))) // and the next daemon still has the CA that the containers trust
	next, _ := s.start()
	s.ready(next, "pod")
	s.wantState(next, "pod", truststore.Trusted, "app")
}

// TestReconnect: the runtime restarts, and has another list of containers then.
func TestReconnect(t *testing.T) {
	t.Parallel()
	s := newScene(t, "pod", "later")
	s.setCA(pki.NewCA("proxy").Cert)
	r := s.newRuntime(running("pod", 4242))
	trust, _ := s.start()
	s.ready(trust, "pod")
	if asked, needed := trust.Asked(); !asked || !needed {
		t.Errorf("asked: %t, needed: %t; want both", asked, needed)
	}
	r.crash()
	s.eventually("the loss is said", func() bool { return s.log.Count("is lost") == 1 })
	if asked, _ := trust.Asked(); asked {
		t.Error("a runtime that has gone asks")
	}
	s.wantState(trust, "pod", truststore.Trusted, "app")
	started := []string{"pod", "started meanwhile"}
	trust.mu.Lock()
	trust.config.Running = func(string) []string { return started }
	trust.mu.Unlock()
	s.wantState(trust, "pod", truststore.Unknown, "was started while the connection")
	s.newRuntime(running("later", 4343))
	s.eventually("the new container is known", func() bool { return trust.State("later").State == truststore.Trusted })
	s.wantState(trust, "pod", truststore.Unknown, "no container runs")
	if lost, back := s.log.Count("is lost"), s.log.Count("connected to"); lost != 1 || back != 2 {
		t.Errorf("got %d lines about the loss and %d about the connection, want 1 and 2", lost, back)
	}
}

// TestServedBefore: a container that was created without the CA, in a pod that was served before the daemon started,
// may have connected. Others of the pod stay trusted by the hook's report.
func TestServedBefore(t *testing.T) {
	t.Parallel()
	s := newScene(t, "pod", "hooked")
	s.setCA(pki.NewCA("proxy").Cert)
	s.must(os.Mkdir(s.path("run/reports"), 0o700))
	s.write("run/reports/hooked.json", s.report(s.ca, truststore.Trusted))
	s.newRuntime(running("pod", 4242), running("hooked", 4343))
	config := s.config()
	config.Served = []string{"pod", "hooked"}
	trust, err := New(config)
	s.must(err)
	s.run(trust)
	s.ready(trust, "pod", "hooked")
	s.wantState(trust, "pod", truststore.Unknown, "given the CA while it ran")
	s.wantState(trust, "hooked", truststore.Trusted, "app")
}

// TestChangingStores: a container with a store that changes by itself is repaired again and again, and stays trusted.
func TestChangingStores(t *testing.T) {
	t.Parallel()
	s := newScene(t, "pod", "steady")
	s.setCA(pki.NewCA("proxy").Cert)
	fingerprints, err := truststore.Fingerprints(s.ca)
	s.must(err)
	report, err := json.Marshal(truststore.Report{
		State: truststore.Trusted, CA: fingerprints,
		Stores: []truststore.Store{{Path: "/x", Kind: truststore.Bundle, Action: truststore.Bound, Changing: true}},
	})
	s.must(err)
	s.must(os.Mkdir(s.path("run/reports"), 0o700))
	s.write("run/reports/pod.json", string(report))
	s.write("run/reports/steady.json", s.report(s.ca, truststore.Trusted))
	s.write("good.json", string(report))
	s.newRuntime(running("pod", 4242), running("steady", 4343))
	trust := s.newTrust()
	trust.retryPause = time.Millisecond
	s.run(trust)
	s.ready(trust, "pod", "steady")
	for _, want := range []string{"4242\n", "4242\n4242\n"} {
		s.eventually("the next look", func() bool {
			trust.Check()
			return strings.HasPrefix(s.repaired(), want)
		})
	}
	s.ready(trust, "pod", "steady")
	s.wantState(trust, "pod", truststore.Trusted, "app")
	if strings.Contains(s.repaired(), "4343") {
		t.Error("a container whose stores do not change was looked at again")
	}
}

// TestNoRuntime: a node without NRI is said once, and nothing waits for it.
func TestNoRuntime(t *testing.T) {
	t.Parallel()
	s := newScene(t, "pod")
	s.setCA(pki.NewCA("proxy").Cert)
	trust, _ := s.start()
	s.ready(trust, "pod")
	s.wantState(trust, "pod", truststore.Unknown, "enable NRI")
	s.newRuntime(running("pod", 4242))
	s.eventually("the container is repaired, late", func() bool { return isLate(trust) })
	if n := s.log.Count("enable NRI"); n != 1 {
		t.Errorf("got %d lines, want 1", n)
	}
}

// TestSilentRuntime: a runtime that accepts the connection and says nothing holds Ready up for a bounded time.
func TestSilentRuntime(t *testing.T) {
	t.Parallel()
	s := newScene(t, "pod")
	l, err := net.Listen("unix", s.path("nri.sock"))
	s.must(err)
	t.Cleanup(func() { _ = l.Close() })
	trust, _ := s.start()
	early, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	if err := trust.Ready(early, "pod"); err == nil {
		t.Error("Ready returned before the runtime was given time")
	}
	s.ready(trust, "pod")
	s.wantState(trust, "pod", truststore.Unknown, "has not been asked yet")
}

// TestStopping: while the runtime stops a container, the daemon does not connect.
func TestStopping(t *testing.T) {
	t.Parallel()
	s := newScene(t, "pod")
	s.setCA(pki.NewCA("proxy").Cert)
	r := s.newRuntime(running("pod", 4242))
	trust := s.newTrust()
	var stopping atomic.Bool
	stopping.Store(true)
	trust.config.Stopping = stopping.Load
	s.run(trust)
	s.ready(trust, "pod")
	s.wantState(trust, "pod", truststore.Unknown, "stops a container")
	stopping.Store(false)
	r.waitFor(1)
	s.ready(trust, "pod")
	if !isLate(trust) {
		t.Errorf("got %+v, want that the repair is late", trust.State("pod"))
	}
}

// isLate reports whether the container of the pod "pod" was given the CA while it ran.
func isLate(trust *Trust) bool {
	containers := trust.State("pod").Containers
	return len(containers) == 1 && strings.Contains(containers[0].Note, "given the CA while it ran")
}

func TestRefusedConfig(t *testing.T) {
	t.Parallel()
	s := newScene(t)
	for want, change := range map[string]func(*Config){
		"CAFile": func(c *Config) { c.CAFile = "" },
		"Dir":    func(c *Config) { c.Dir = "run" },
		"Hook":   func(c *Config) { c.Hook = "sluice" },
		"Wanted": func(c *Config) { c.Wanted = nil },
	} {
		config := s.config()
		change(&config)
		if _, err := New(config); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %v", want, err)
		}
	}
}
