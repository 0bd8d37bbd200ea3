package e2e

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/e2e-framework/klient/k8s"
	"sigs.k8s.io/e2e-framework/klient/k8s/resources"
	"sigs.k8s.io/e2e-framework/pkg/envconf"
)

// The namespaces of the pods below. Only nsOptedIn has the label.
const (
	nothingOptedIn = "opt-in-none"
	podOptedIn     = "opt-in-pod"
	nsOptedIn      = "opt-in-namespace"
	firstOptsIn    = "opt-in-first" // for one pod, while the daemon is down
)

var optInNamespaces = []string{nothingOptedIn, podOptedIn, nsOptedIn, firstOptsIn}

// optInPod is a pod whose only request goes to the server, and the outcome for it.
type optInPod struct {
	name, namespace string
	label           string // of the pod; "" for none
	captured        bool   // the request goes through the proxy
}

var (
	plainPod   = optInPod{name: "plain", namespace: nothingOptedIn}
	labelledIn = optInPod{name: "label-on-pod", namespace: podOptedIn, label: "true", captured: true}
	byNS       = optInPod{name: "label-on-namespace", namespace: nsOptedIn, captured: true}
	optedOut   = optInPod{name: "label-false", namespace: nsOptedIn, label: "false"}
	firstPod   = optInPod{name: "first", namespace: firstOptsIn, label: "true"}
)

// optInState is a state of the node in which pods start.
type optInState struct {
	name string
	// known are pods that are created, and that kubelet knows, before the state begins.
	known bool
	// newProxy: another proxy runs at the end, with a log of its own.
	newProxy bool
	begin    func(ctx context.Context, t *testing.T, c *envconf.Config)
	end      func(ctx context.Context, t *testing.T, c *envconf.Config)
}

var (
	allRuns = optInState{
		name:  "all runs",
		begin: func(context.Context, *testing.T, *envconf.Config) {},
		end:   func(context.Context, *testing.T, *envconf.Config) {},
	}
	daemonDown     = optInState{name: "the daemon is down", begin: stopDaemon, end: startDaemon}
	daemonNeverRan = optInState{name: "the daemon never ran", begin: forgetDaemon, end: startDaemon}
	apiServerDown  = optInState{
		name: "the API server is down, and the daemon has restarted", known: true, begin: stopServer, end: startServer,
	}
	bothDown = optInState{
		name: "the API server and the daemon are down", known: true, begin: stopServerAndDaemon,
		end: startServerAndDaemon,
	}
	proxyDown = optInState{name: "the proxy is down", newProxy: true, begin: stopProxy, end: startProxy}
)

// TestOptIn starts pods in each state of the node, with the admission policy and without it.
func TestOptIn(t *testing.T) {
	step(t, "sluice and the proxy run, and the namespaces exist", func(
		ctx context.Context, t *testing.T, c *envconf.Config,
	) {
		must(t, applyFile(ctx, c, "mitmproxy/mitmproxy.yaml"))
		for _, ns := range optInNamespaces {
			o := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: ns}}
			if ns == nsOptedIn {
				o.Labels = capture
			}
			must(t, client(c).Create(ctx, o))
		}
	})
	run := 0
	for _, mode := range []struct {
		policy string
		// want are, by the state, the pods whose request is answered in it. The others wait until it ends.
		want map[string][]optInPod
	}{
		{
			"v1beta1",
			map[string][]optInPod{
				allRuns.name:        {plainPod, labelledIn, byNS, optedOut},
				daemonDown.name:     {plainPod, optedOut},
				daemonNeverRan.name: {plainPod, optedOut},
				apiServerDown.name:  {plainPod, optedOut},
				bothDown.name:       {plainPod, optedOut},
				proxyDown.name:      {plainPod, optedOut},
			},
		},
		{
			"none",
			map[string][]optInPod{
				allRuns.name:       {plainPod, labelledIn, byNS, optedOut},
				daemonDown.name:    {plainPod, firstPod},
				apiServerDown.name: {plainPod},
				bothDown.name:      {plainPod},
				proxyDown.name:     {plainPod, optedOut},
			},
		},
	} {
		step(t, "policy "+mode.policy, func(ctx context.Context, t *testing.T, c *envconf.Config) {
			usePolicy(ctx, t, c, mode.policy)
		})
		for _, s := range []optInState{allRuns, daemonDown, daemonNeverRan, apiServerDown, bothDown, proxyDown} {
			pods := []optInPod{plainPod, labelledIn, byNS, optedOut}
			if slices.Contains(mode.want[s.name], firstPod) {
				pods = append(pods, firstPod)
			}
			step(t, fmt.Sprintf("policy %s, and %s", mode.policy, s.name), func(
				ctx context.Context, t *testing.T, c *envconf.Config,
			) {
				run++
				startPods(ctx, t, c, s, run, pods, mode.want[s.name])
			})
		}
	}
	step(t, "the namespaces are deleted, and are no longer on the node's list", func(
		ctx context.Context, t *testing.T, c *envconf.Config,
	) {
		for _, ns := range optInNamespaces {
			must(t, client(c).Delete(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: ns}}))
		}
		for _, ns := range optInNamespaces {
			must(t, deleteNamespace(ctx, c, ns))
		}
		waitFor(ctx, t, "the daemon has written the list again", func() (bool, error) {
			text, err := node(ctx, "cat /var/lib/sluice/opted-in.json")
			return !strings.Contains(text, "opt-in-"), err
		})
	})
}

// usePolicy deploys sluice with the version of the API of the policy, and a short limit.
func usePolicy(ctx context.Context, t *testing.T, c *envconf.Config, version string) {
	policy := strings.SplitAfter(render(ctx, t, "optInPolicy=v1beta1"), "---\n")
	policy = slices.DeleteFunc(policy, func(o string) bool { return !strings.Contains(o, "kind: MutatingAdmission") })
	if len(policy) != 2 {
		t.Fatalf("the policy and its binding are %d objects", len(policy))
	}
	must(t, remove(ctx, c, strings.Join(policy, "")))
	must(t, apply(ctx, c, render(ctx, t, "optInPolicy="+version, "plugin.provisionalFor=10s")))
	waitForRollout(ctx, t, c, system, "sluice")
	waitForRollout(ctx, t, c, proxies, "mitmproxy")
	waitFor(ctx, t, "the API server uses the policy, or does not", func() (bool, error) {
		p := newPod("dry-run", nsOptedIn, nil, "", "")
		err := client(c).Create(ctx, p, func(o *metav1.CreateOptions) { o.DryRun = []string{metav1.DryRunAll} })
		_, written := p.Annotations["sluice.dev/opt-in"]
		return written == (version != "none"), err
	})
}

// startPods starts pods in a state of the node, and checks when and how the request of each is answered.
func startPods(
	ctx context.Context, t *testing.T, c *envconf.Config, s optInState, run int, pods, answered []optInPod,
) {
	const dir = "/run/sluice-e2e-opt-in"
	mkdir := func() {
		_, err := node(ctx, "mkdir -p "+dir)
		must(t, err)
	}
	t.Cleanup(func() { _, _ = node(context.WithoutCancel(ctx), "rm -rf "+dir) })
	atProxy, atServer := proxyRequests(ctx, t, c), serverRequests(ctx, t, c)
	if !s.known {
		mkdir()
		s.begin(ctx, t, c)
	}
	for _, p := range pods {
		must(t, client(c).Create(ctx, p.object(run, urls(ctx, t, c)[0], dir)))
	}
	if s.known { // kubelet creates no sandbox before the folder exists
		for _, p := range pods {
			waitFor(ctx, t, "kubelet waits for the folder of "+p.name, func() (bool, error) {
				return hasEventIn(ctx, c, p.namespace, p.object(run, "", dir).Name, "FailedMount", dir)
			})
		}
		s.begin(ctx, t, c)
		mkdir()
	}
	ended := false
	end := func() {
		if !ended {
			ended = true
			s.end(context.WithoutCancel(ctx), t, c)
		}
	}
	defer end()
	waitForFile := func(p optInPod, name, event string) {
		waitFor(ctx, t, p.name+" "+event, func() (bool, error) {
			_, err := node(ctx, "test -s "+dir+"/"+p.name+"."+name)
			return err == nil, nil
		})
	}
	for _, p := range pods {
		waitForFile(p, "started", "runs")
	}
	for _, p := range pods {
		if slices.Contains(answered, p) {
			waitForFile(p, "answer", "has its answer, although "+s.name)
		}
	}
	for _, p := range pods {
		if _, err := node(ctx, "test ! -e "+dir+"/"+p.name+".answer"); err != nil && !slices.Contains(answered, p) {
			t.Errorf("%s has an answer, although %s", p.name, s.name)
		}
	}
	end()
	if s.newProxy {
		atProxy = 0
	}
	captured := 0
	for _, p := range pods {
		waitForFile(p, "answer", "has its answer")
		if p.captured {
			captured++
		}
	}
	wantProxyRequests(ctx, t, c, atProxy, captured)
	waitFor(ctx, t, "the server has logged every request", func() (bool, error) {
		return serverRequests(ctx, t, c) == atServer+len(pods), nil
	})
	if slices.Contains(pods, firstPod) {
		waitFor(ctx, t, "an event says that the pod was captured late", func() (bool, error) {
			name := firstPod.object(run, "", dir).Name
			return hasEventIn(ctx, c, firstPod.namespace, name, "SluiceCapturedLate", "packets of the pod left")
		})
	}
	for _, p := range pods {
		must(t, client(c).Delete(ctx, p.object(run, "", dir)))
	}
}

// object is the pod of a run of startPods. In the folder dir of the node it leaves a sign that it runs, and the answer
// to its request.
func (p optInPod) object(run int, url, dir string) *corev1.Pod {
	script := fmt.Sprintf(`cd /shared && echo yes > %[1]s.started && wget -q -O- %[2]s > %[1]s.new &&
		mv %[1]s.new %[1]s.answer && sleep 86400`, p.name, url)
	var labels map[string]string
	if p.label != "" {
		labels = map[string]string{"sluice.dev/capture": p.label}
	}
	o := newPod(fmt.Sprintf("%s-%d", p.name, run), p.namespace, labels, script, "")
	o.Spec.Containers[0].VolumeMounts = []corev1.VolumeMount{{Name: "shared", MountPath: "/shared"}}
	o.Spec.Volumes = []corev1.Volume{{Name: "shared", VolumeSource: corev1.VolumeSource{
		HostPath: &corev1.HostPathVolumeSource{Path: dir, Type: new(corev1.HostPathDirectory)},
	}}}
	return o
}

// missingImage is the name of an image that the node does not have.
const missingImage = "localhost/missing:e2e"

// stopDaemon deletes the daemon's pod. Its successor does not start, because its image is missing. So sluice stays
// installed.
func stopDaemon(ctx context.Context, t *testing.T, c *envconf.Config) {
	t.Helper()
	setDaemonImage(ctx, t, c, missingImage)
	waitFor(ctx, t, "no daemon runs", func() (bool, error) {
		var pods corev1.PodList
		err := client(c).WithNamespace(system).List(ctx, &pods, resources.WithLabelSelector(daemonPods))
		if err != nil {
			return false, err
		}
		ended := true
		for _, p := range pods.Items {
			if p.Spec.Containers[0].Image == missingImage {
				continue
			}
			ended = false
			if err := client(c).Delete(ctx, &p); err != nil && !apierrors.IsNotFound(err) {
				return false, err
			}
		}
		return ended, nil
	})
}

func startDaemon(ctx context.Context, t *testing.T, c *envconf.Config) {
	t.Helper()
	setDaemonImage(ctx, t, c, "sluice:e2e")
	waitForRollout(ctx, t, c, system, "sluice")
}

func setDaemonImage(ctx context.Context, t *testing.T, c *envconf.Config, image string) {
	t.Helper()
	patch := fmt.Sprintf(`{"spec":{"template":{"spec":{"containers":[{"name":"sluiced","image":%q}]}}}}`, image)
	must(t, client(c).Patch(ctx, daemonSet(system, "sluice"), k8s.Patch{
		PatchType: types.StrategicMergePatchType, Data: []byte(patch),
	}))
}

// forgetDaemon leaves the node as an installation of the plugin does whose daemon has not run yet.
func forgetDaemon(ctx context.Context, t *testing.T, c *envconf.Config) {
	stopDaemon(ctx, t, c)
	_, err := node(ctx, "rm /var/lib/sluice/opted-in.json")
	must(t, err)
}

// stopServer stops the API server, and restarts the daemon, which then knows no labels.
func stopServer(ctx context.Context, t *testing.T, c *envconf.Config) {
	stopServerAlone(ctx, t, c)
	_, err := node(ctx, "pkill -9 -x sluiced")
	must(t, err)
}

func stopServerAlone(ctx context.Context, t *testing.T, c *envconf.Config) {
	t.Helper()
	if os.Getenv(onNode) == "" {
		t.Fatalf("%s is not set: see the Makefile", onNode)
	}
	_, err := nodeNamed(ctx, apiServerNode, stopAPIServer)
	must(t, err)
	waitFor(ctx, t, "the API server is down", func() (bool, error) {
		return client(c).Get(ctx, "server", namespace, &corev1.Pod{}) != nil, nil
	})
}

func startServer(ctx context.Context, t *testing.T, c *envconf.Config) {
	startServerAlone(ctx, t, c)
	waitForRollout(ctx, t, c, system, "sluice")
}

func startServerAlone(ctx context.Context, t *testing.T, c *envconf.Config) {
	t.Helper()
	_, err := nodeNamed(ctx, apiServerNode, startAPIServer)
	must(t, err)
	waitFor(ctx, t, "the API server responds again", func() (bool, error) {
		return client(c).Get(ctx, "server", namespace, &corev1.Pod{}) == nil, nil
	})
}

// waitForControllers waits until the controllers work, by one that makes a ServiceAccount in a new namespace. Those of
// kind end without the API server, and kubelet starts them again up to five minutes later; others take a minute.
func waitForControllers(ctx context.Context, t *testing.T, c *envconf.Config) {
	t.Helper()
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "controllers-"}}
	must(t, client(c).Create(ctx, ns))
	must(t, within(ctx, 6*time.Minute, "the controllers work", func() (bool, error) {
		return client(c).Get(ctx, "default", ns.Name, &corev1.ServiceAccount{}) == nil, nil
	}))
	must(t, client(c).Delete(ctx, ns))
}

func stopServerAndDaemon(ctx context.Context, t *testing.T, c *envconf.Config) {
	stopDaemon(ctx, t, c)
	stopServerAlone(ctx, t, c)
}

func startServerAndDaemon(ctx context.Context, t *testing.T, c *envconf.Config) {
	startServerAlone(ctx, t, c)
	startDaemon(ctx, t, c)
}

func stopProxy(ctx context.Context, t *testing.T, c *envconf.Config) {
	placeDaemonSet(ctx, t, c, proxies, "mitmproxy", false)
	waitFor(ctx, t, "no proxy runs", func() (bool, error) {
		var pods corev1.PodList
		err := client(c).WithNamespace(proxies).List(ctx, &pods, resources.WithLabelSelector("app=mitmproxy"))
		return len(pods.Items) == 0, err
	})
}

func startProxy(ctx context.Context, t *testing.T, c *envconf.Config) {
	placeDaemonSet(ctx, t, c, proxies, "mitmproxy", true)
	waitForRollout(ctx, t, c, proxies, "mitmproxy")
}
