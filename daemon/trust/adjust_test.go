package trust

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/containerd/nri/pkg/api"
	"github.com/google/go-cmp/cmp"

	"github.com/sluice-cni/sluice/integration/pki"
)

// TestAdjustment compares the additions to a container with golden text.
func TestAdjustment(t *testing.T) {
	t.Parallel()
	const bareHook = "hook /opt/cni/bin/sluice in 2s: /opt/cni/bin/sluice ca-hook --ca RUN/ca.pem " +
		"--report RUN/reports/c1.json --bundle /.sluice-ca/roots/bundle.crt"
	const hook = bareHook + "\n"
	const mount = "mount RUN/files at /.sluice-ca: bind rbind,ro,rprivate,nosuid,nodev,noexec\n"
	const node, deno = "NODE_EXTRA_CA_CERTS=/.sluice-ca/ca.crt\n", "DENO_CERT=/.sluice-ca/ca.crt\n"
	const ssl = "SSL_CERT_FILE=/.sluice-ca/roots/bundle.crt\n"
	const requests = "REQUESTS_CA_BUNDLE=/.sluice-ca/roots/bundle.crt\n"
	for _, test := range []struct {
		name   string
		before func(s *scene, trust *Trust)
		c      *api.Container
		want   string
	}{
		{name: "nothing of its own", c: &api.Container{}, want: hook + mount + node + deno + ssl + requests},
		{
			name: "variables of its own",
			c:    &api.Container{Env: []string{"NODE_EXTRA_CA_CERTS=/x", "SSL_CERT_FILE=", "DENO_CERT"}},
			want: bareHook + " --named=/x\n" + mount + requests,
		},
		{
			name: "variables that ours would override",
			c:    &api.Container{Env: []string{"SSL_CERT_DIR=/x:/y", "CURL_CA_BUNDLE=/x"}},
			want: bareHook + " --named=/x --named=/y\n" + mount + node + deno,
		},
		{
			name: "variables of another sluiced",
			c: &api.Container{Env: []string{
				"NODE_EXTRA_CA_CERTS=" + CAPath, "SSL_CERT_FILE=" + BundlePath, "PIP_CERT=/z",
			}},
			want: bareHook + " --named=/z\n" + mount + deno + requests,
		},
		{
			name: "its own createContainer hook",
			c: &api.Container{Hooks: &api.Hooks{
				CreateContainer: []*api.Hook{{Path: "/x", Args: []string{"x", "y"}}},
			}},
			want: hook + mount + node + deno + ssl + requests,
		},
		{
			name: "no CA yet", c: &api.Container{}, want: hook + mount + node + deno + ssl + requests,
			before: func(s *scene, trust *Trust) {
				s.must(os.RemoveAll(s.path("run")))
				s.must(os.RemoveAll(s.path("ca")))
				trust.updateCA()
				if got, want := s.read("run/files/ca.crt"), s.read("roots.crt"); got != want {
					s.t.Errorf("ca.crt: got %q, want the public roots", got)
				}
			},
		},
		{
			name: "no public roots", c: &api.Container{}, want: hook + mount + node + deno,
			before: func(s *scene, trust *Trust) {
				s.must(os.RemoveAll(s.path("run")))
				trust.files.roots = nil
				trust.updateCA()
			},
		},
		{
			name: "neither", c: &api.Container{}, want: hook + mount,
			before: func(s *scene, trust *Trust) {
				s.must(os.RemoveAll(s.path("run")))
				s.must(os.RemoveAll(s.path("ca")))
				trust.files.roots = nil
				trust.updateCA()
			},
		},
		{
			name: "no plugin", c: &api.Container{}, want: mount + node + deno + ssl + requests,
			before: func(s *scene, _ *Trust) { s.must(os.Remove(s.path("plugin"))) },
		},
		{
			name: "no files", c: &api.Container{}, want: hook,
			before: func(s *scene, _ *Trust) { s.must(os.RemoveAll(s.path("run"))) },
		},
		{
			name: "another mount at the place",
			c:    &api.Container{Mounts: []*api.Mount{{Destination: MountPath, Source: "/x"}}},
			want: hook,
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			s := newScene(t)
			s.setCA(pki.NewCA("proxy").Cert)
			trust := s.newTrust()
			trust.updateCA()
			if test.before != nil {
				test.before(s, trust)
			}
			test.c.Id = "c1"
			got := strings.ReplaceAll(text(trust.adjustment(test.c)), s.path("run"), "RUN")
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
}

// text writes an adjustment, one addition a line.
func text(adjust *api.ContainerAdjustment) string {
	var b strings.Builder
	for _, h := range adjust.GetHooks().GetCreateContainer() {
		fmt.Fprintf(&b, "hook %s in %ds: %s\n", h.Path, h.Timeout.GetValue(), strings.Join(h.Args, " "))
	}
	for _, m := range adjust.GetMounts() {
		fmt.Fprintf(&b, "mount %s at %s: %s %s\n", m.Source, m.Destination, m.Type, strings.Join(m.Options, ","))
	}
	for _, e := range adjust.GetEnv() {
		fmt.Fprintf(&b, "%s=%s\n", e.Key, e.Value)
	}
	return b.String()
}

// TestOnlyWanted: the runtime gets nothing to add to a container of another pod.
func TestOnlyWanted(t *testing.T) {
	t.Parallel()
	s := newScene(t, "wanted")
	s.setCA(pki.NewCA("proxy").Cert)
	r := s.newRuntime()
	s.start()
	r.waitFor(1)
	if got := text(r.create(&api.Container{Id: "c2", PodSandboxId: "other"})); got != "" {
		t.Errorf("another pod's container: got %s, want nothing", got)
	}
	if got := text(r.create(&api.Container{Id: "c1", PodSandboxId: "wanted"})); strings.Count(got, "\n") != 6 {
		t.Errorf("a wanted pod's container: got %s, want 6 additions", got)
	}
}

// TestOlderPlugin: a plugin that does not know the hook would keep the container from starting. The hook is added as
// soon as the plugin is replaced.
func TestOlderPlugin(t *testing.T) {
	t.Parallel()
	s := newScene(t, "wanted")
	s.setCA(pki.NewCA("proxy").Cert)
	s.must(os.WriteFile(s.path("plugin"), []byte("#!/bin/sh\necho 'CNI_COMMAND is missing' >&2; exit 1\n"), 0o755))
	r := s.newRuntime()
	s.start()
	r.waitFor(1)
	create := func() string { return text(r.create(&api.Container{Id: "c1", PodSandboxId: "wanted"})) }
	if got := create(); strings.Contains(got, "hook ") || !strings.Contains(got, "mount ") {
		t.Errorf("with an older plugin: got %s, want no hook, and the mount", got)
	}
	s.plugin("")
	if got := create(); !strings.Contains(got, "hook ") {
		t.Errorf("with the plugin: got %s, want the hook", got)
	}
}

// TestTwoDaemons: while one daemon replaces another, each container gets everything once.
func TestTwoDaemons(t *testing.T) {
	t.Parallel()
	s := newScene(t, "wanted")
	s.setCA(pki.NewCA("proxy").Cert)
	r := s.newRuntime()
	_, stopFirst := s.start()
	r.waitFor(1)
	alone := text(r.create(&api.Container{Id: "c1", PodSandboxId: "wanted"}))
	s.start()
	r.waitFor(2)
	if both := text(r.create(&api.Container{Id: "c1", PodSandboxId: "wanted"})); both != alone {
		t.Errorf("two daemons: got %s, want %s", both, alone)
	}
	stopFirst()
	if second := text(r.create(&api.Container{Id: "c1", PodSandboxId: "wanted"})); second != alone {
		t.Errorf("the second daemon: got %s, want %s", second, alone)
	}
}
