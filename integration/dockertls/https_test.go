package dockertls

import (
	"strings"
	"testing"

	"github.com/sluice-cni/sluice/integration/testbed"
)

// untrusted is the exit code of curl for a certificate that it does not trust.
const untrusted = 60

// TestDocker: dockerd pulls through the proxy, and containers that it starts work although they do not trust the proxy.
func TestDocker(t *testing.T) {
	t.Parallel()
	s := newScene(t)
	pod, docker := s.startDocker("runner", nil)
	if a := s.Daemon.Of(pod); a.Trust != "trusted" {
		t.Errorf("the state of the pod is %q, %q; want trusted", a.Trust, a.Notes)
	}

	docker.Pull(image, "latest")
	s.WaitLogged(" default/runner: GET https://" + registryName + "/v2/tools/manifests/")
	s.WaitLogged(" default/runner: GET https://" + registryName + "/v2/tools/blobs/sha256:")

	t.Run("a container", func(t *testing.T) {
		out, code := docker.RunToEnd(image, "bridge", request("container.example.test")...)
		if code != 0 {
			t.Errorf("exit code %d", code)
		}
		wantPage(t, out)
		s.wantPassed("container.example.test", "nested")
	})
	t.Run("a step of a build", func(t *testing.T) {
		wantPage(t, docker.BuildFrom(image, "bridge", request("build.example.test")...))
		s.wantPassed("build.example.test", "nested")
	})
	// It has the pod's own addresses, so it counts as the pod, whose containers trust the CA.
	t.Run("a container in the pod's own network", func(t *testing.T) {
		for i := range 2 {
			if out, code := docker.RunToEnd(image, "host", request("host.example.test")...); code != untrusted {
				t.Fatalf("connection %d: exit code %d, want %d\n%s", i, code, untrusted, out)
			}
		}
		s.WaitLogged("default/runner: clients refuse the certificate for host.example.test")
		out, _ := docker.RunToEnd(image, "host", request("host.example.test")...)
		wantPage(t, out)
		s.wantPassed("host.example.test", "the client refused the certificate")
	})
	if strings.Contains(s.Proxy.Log(), "GET https://container.example.test/") {
		t.Error("the proxy has seen the request of a container")
	}
}

// wantPassed waits until a connection to a name is in the log and in the list of flows, as passed through for a reason.
func (s *scene) wantPassed(name, reason string) {
	s.t.Helper()
	s.WaitLogged("TLS passed through: default/runner to " + name + " (" + testbed.WorldIPv4 + ":443), " + reason + ",")
	s.WaitLogged("tcp from ", " of default/runner ", "TLS passed through: "+reason)
}
