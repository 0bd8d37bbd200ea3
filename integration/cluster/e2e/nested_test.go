package e2e

import (
	"context"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/e2e-framework/pkg/envconf"
)

// nestedRoot makes a root for nested containers. Its store is the image's: without the CA that the pod's own container
// has been given.
const nestedRoot = `mkdir /c && mount -t tmpfs tmpfs /c && cp -a /bin /lib /lib64 /usr /etc /c &&
	sed '/Added by sluice/,$d' ` + imageStore + ` >/c` + imageStore + ` && touch /ready && sleep 86400`

// inNested starts a program in a container as a Docker does: with a root, a mount namespace and a PID namespace of its
// own.
const inNested = "unshare -m -p -f chroot /c "

// TestNested is the story of a pod that starts containers itself, under a daemon with the privileges for them.
func TestNested(t *testing.T) {
	step(t, "sluice runs with the privileges", func(ctx context.Context, t *testing.T, c *envconf.Config) {
		must(t, applyFile(ctx, c, "mitmproxy/mitmproxy.yaml"))
		must(t, apply(ctx, c, renderChart(ctx, t, "--set", "nested.enabled=true")))
		waitForRollout(ctx, t, c, system, "sluice")
		waitForRollout(ctx, t, c, proxies, "mitmproxy")
		waitForRoot(ctx, t, c)
	})
	step(t, "a nested container trusts the CA, and nothing is written into its root", nestedContainer)
}

func nestedContainer(ctx context.Context, t *testing.T, c *envconf.Config) {
	startNestedPod(ctx, t, c, "nested", map[string]string{"sluice.dev/nested": "inspect"})
	startNestedPod(ctx, t, c, "not-nested", nil)
	waitFor(ctx, t, "a nested container has the CA", func() (bool, error) {
		return countCA(ctx, c, "nested", inNested) == "1", nil
	})
	if got := countCA(ctx, c, "not-nested", inNested); got != "0" {
		t.Errorf("without the annotation a nested container has %q certificates of the CA, want 0", got)
	}
	if got := countCA(ctx, c, "nested", "chroot /c "); got != "0" {
		t.Errorf("the root of the nested containers has %q certificates of the CA, want 0", got)
	}
	const variable = `sh -c 'echo "$DENO_TLS_CA_STORE"'`
	for pod, want := range map[string]string{"nested": "mozilla,system\n", "not-nested": "\n"} {
		got, err := inPod(ctx, c, namespace, pod, "sh", "-c", inNested+variable)
		must(t, err)
		if got != want {
			t.Errorf("%s: the first program has the variable %q, want %q", pod, got, want)
		}
	}
	_, err := inPod(ctx, c, namespace, "nested", "sh", "-c", inNested+"sleep 86400 </dev/null >/dev/null 2>&1 &")
	must(t, err)
	waitFor(ctx, t, "the status has the container", func() (bool, error) {
		a, err := attachment(ctx, c, namespace+"/nested")
		return len(a.Nested) == 1 && a.Nested[0].Trust == "trusted", err
	})
	for _, name := range []string{"nested", "not-nested"} {
		must(t, client(c).Delete(ctx, newPod(name, namespace, nil, "", "")))
	}
}

// startNestedPod starts a captured pod with the privileges of a Docker.
func startNestedPod(
	ctx context.Context, t *testing.T, c *envconf.Config, name string, annotations map[string]string,
) {
	t.Helper()
	p := newPod(name, namespace, capture, nestedRoot, "")
	p.Annotations = annotations
	privileged := true
	p.Spec.Containers[0].SecurityContext = &corev1.SecurityContext{Privileged: &privileged}
	must(t, client(c).Create(ctx, p))
	waitFor(ctx, t, name+" is ready", func() (bool, error) {
		_, err := inPod(ctx, c, namespace, name, "ls", "/ready")
		return err == nil, nil
	})
}

// countCA counts the certificates that sluice has added to the store which a program sees, started in some way.
func countCA(ctx context.Context, c *envconf.Config, pod, start string) string {
	out, err := inPod(ctx, c, namespace, pod, "sh", "-c", start+"grep -c 'Added by sluice' "+imageStore+"; true")
	if err != nil {
		return err.Error()
	}
	return strings.TrimSpace(out)
}
