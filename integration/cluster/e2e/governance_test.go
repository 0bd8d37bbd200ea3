package e2e

import (
	"context"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	nodev1 "k8s.io/api/node/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/e2e-framework/pkg/envconf"
)

// governed is what the operator of the cluster allows in TestGovernance.
const governed = `
capture:
  source: kubernetes
  excludePorts: ["53"]
  namespaces:
    selected:
      - matchLabels: {team: a}
      - matchExpressions: [{key: tier, operator: Exists}, {key: tier, operator: NotIn, values: [w, x]}]
    enforced:
      - matchExpressions: [{key: team, operator: In, values: [b, c]}, {key: free, operator: DoesNotExist}]
  annotations: {exclude-outbound-ports: [5432], when-late: any}
`

// captureLabel opts in or out.
const captureLabel = "sluice.dev/capture"

// governedNamespaces are namespaces by their labels, and the value of captureLabel that they stand for.
var governedNamespaces = map[string]struct {
	labels map[string]string
	as     string
}{
	"gov-none":           {nil, "false"},
	"gov-true":           {map[string]string{captureLabel: "true"}, "true"},
	"gov-false":          {map[string]string{captureLabel: "false"}, "false"},
	"gov-wrong":          {map[string]string{captureLabel: "yes"}, "yes"},
	"gov-enforced":       {map[string]string{captureLabel: "enforced"}, "enforced"},
	"gov-selected":       {map[string]string{"team": "a"}, "true"},
	"gov-selected-false": {map[string]string{"team": "a", captureLabel: "false"}, "false"},
	"gov-tier":           {map[string]string{"tier": "z"}, "true"},
	"gov-tier-x":         {map[string]string{"tier": "x"}, "false"},
	"gov-kept":           {map[string]string{"team": "b", captureLabel: "false"}, "enforced"},
	"gov-free":           {map[string]string{"team": "b", "free": "yes"}, "false"},
}

// TestGovernance is the story of an operator who decides which pods are captured, whatever their users want.
func TestGovernance(t *testing.T) {
	step(t, "sluice runs with the policy and its namespaces", governedNode)
	step(t, "the policy knows each kind of pod", policyAgrees)
	step(t, "a pod cannot opt out of a namespace that is enforced", enforcedPods)
	step(t, "a pod may not ask for more than is allowed", refusedPods)
	step(t, "a pod whose runtime has a network stack of its own is found", sandboxedPod)
	step(t, "the namespaces are removed", func(ctx context.Context, t *testing.T, c *envconf.Config) {
		for name := range governedNamespaces {
			must(t, client(c).Delete(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}))
		}
		for name := range governedNamespaces {
			must(t, deleteNamespace(ctx, c, name))
		}
	})
}

func governedNode(ctx context.Context, t *testing.T, c *envconf.Config) {
	for name, ns := range governedNamespaces {
		must(t, client(c).Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: ns.labels}}))
	}
	values := filepath.Join(t.TempDir(), "values.yaml") // a comma in a name of the test would be one of helm's list
	must(t, os.WriteFile(values, []byte("config:"+strings.ReplaceAll(governed, "\n", "\n  ")), 0o600))
	must(t, applyFile(ctx, c, "mitmproxy/mitmproxy.yaml"))
	must(t, apply(ctx, c, renderChart(ctx, t, "--values", values, "--set", "optInPolicy=v1beta1")))
	waitForRollout(ctx, t, c, system, "sluice")
	waitForRollout(ctx, t, c, proxies, "mitmproxy")
	waitFor(ctx, t, "the API server uses the policy", func() (bool, error) {
		p, err := dryRun(ctx, c, newPod("dry-run", "gov-kept", nil, "", ""))
		return p.Annotations["sluice.dev/opt-in"] == "true", err
	})
}

// policyAgrees checks the annotation that the policy writes, for each kind of pod in each kind of namespace.
func policyAgrees(ctx context.Context, t *testing.T, c *envconf.Config) {
	for name, ns := range governedNamespaces {
		for _, label := range []string{"", "true", "false", "x"} {
			labels, asked := map[string]string{}, ns.as
			if label != "" {
				labels[captureLabel] = label
				if ns.as != "enforced" {
					asked = label
				}
			}
			p, err := dryRun(ctx, c, newPod("dry-run", name, labels, "", ""))
			must(t, err)
			if got, want := p.Annotations["sluice.dev/opt-in"], strconv.FormatBool(asked != "false"); got != want {
				t.Errorf("in %s, a pod with the label %q: the policy says %q, want %s", name, label, got, want)
			}
		}
	}
}

// enforcedPods checks that pods with the label "false" are captured: by the label of their namespace, and by the
// configuration.
func enforcedPods(ctx context.Context, t *testing.T, c *envconf.Config) {
	for _, ns := range []string{"gov-enforced", "gov-kept"} {
		must(t, client(c).Create(ctx, newPod("kept", ns, map[string]string{captureLabel: "false"}, "sleep 86400", "")))
		waitForState(ctx, t, c, ns+"/kept", "captured")
		for _, url := range urls(ctx, t, c) {
			before := proxyRequests(ctx, t, c)
			waitFor(ctx, t, "the pod has its answer", func() (bool, error) {
				out, err := inPod(ctx, c, ns, "kept", "wget", "-q", "-O-", url)
				return err == nil && out == "hello\n", nil
			})
			wantProxyRequests(ctx, t, c, before, 1)
		}
	}
}

func waitForState(ctx context.Context, t *testing.T, c *envconf.Config, pod, state string) {
	t.Helper()
	waitFor(ctx, t, pod+" is "+state, func() (bool, error) {
		a, err := attachment(ctx, c, pod)
		return a.State == state, err
	})
}

// refusedPods checks that pods with annotations that are not allowed do not start, and that events say why.
func refusedPods(ctx context.Context, t *testing.T, c *envconf.Config) {
	for _, tc := range []struct{ name, namespace, annotation, value, want string }{
		{"cidrs", "gov-true", "exclude-outbound-cidrs", "0.0.0.0/0", "(capture.annotations) does not allow"},
		{"ports", "gov-true", "exclude-outbound-ports", "5432,1-65535", "(capture.annotations) does not allow"},
		{"late", "gov-enforced", "when-late", "direct", "the namespace enforces the capture"},
	} {
		p := newPod(tc.name, tc.namespace, nil, "sleep 86400", "")
		p.Annotations = map[string]string{"sluice.dev/" + tc.annotation: tc.value}
		must(t, client(c).Create(ctx, p))
		waitFor(ctx, t, "an event says why the pod "+tc.name+" is refused", func() (bool, error) {
			return hasEventIn(ctx, c, tc.namespace, tc.name, "SluiceRefused", tc.want)
		})
	}
	allowed := newPod("allowed", "gov-true", nil, "sleep 86400", "")
	allowed.Annotations = map[string]string{
		"sluice.dev/exclude-outbound-ports": "5432", "sluice.dev/when-late": "direct",
	}
	must(t, client(c).Create(ctx, allowed))
	waitForState(ctx, t, c, "gov-true/allowed", "captured")
}

// sandboxedPod takes the address of a pod off its interface, as gVisor does. Only a pod with a RuntimeClass is looked
// at.
func sandboxedPod(ctx context.Context, t *testing.T, c *envconf.Config) {
	class := &nodev1.RuntimeClass{ObjectMeta: metav1.ObjectMeta{Name: "like-gvisor"}, Handler: "runc"}
	must(t, client(c).Create(ctx, class))
	defer func() { must(t, client(c).Delete(context.WithoutCancel(ctx), class)) }()
	p := newPod("sandboxed", "gov-true", nil, "sleep 86400", "")
	p.Spec.RuntimeClassName = &class.Name
	must(t, client(c).Create(ctx, p))
	waitForState(ctx, t, c, "gov-true/sandboxed", "captured")
	a, err := attachment(ctx, c, "gov-true/sandboxed")
	must(t, err)
	_, err = node(ctx, "nsenter --net="+a.Netns+" ip addr flush dev eth0")
	must(t, err)
	waitForState(ctx, t, c, "gov-true/sandboxed", "not captured")
	const reason = "the runtime of its RuntimeClass like-gvisor has a network stack of its own"
	waitFor(ctx, t, "an event says why", func() (bool, error) {
		return hasEventIn(ctx, c, "gov-true", "sandboxed", "SluiceNotCaptured", reason)
	})
	name, err := only(ctx, c, system, daemonPods)
	must(t, err)
	out, err := inPod(ctx, c, system, name, "sluiced", "status")
	must(t, err)
	if want := "gov-true/sandboxed: it opted in and is NOT CAPTURED: " + reason; !strings.Contains(out, want) {
		t.Errorf("the status has no %q:\n%s", want, out)
	}
}
