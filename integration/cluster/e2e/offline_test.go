package e2e

import (
	"context"
	"os"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/e2e-framework/pkg/envconf"
)

// The API server is a static pod on kind, and a program that the supervisor of integration/cluster restarts otherwise.
const (
	stopAPIServer = `if cd /etc/kubernetes/manifests 2>/dev/null; then mv kube-apiserver.yaml ..
		else touch /run/stopped/kube-apiserver; pkill -9 kube-apiserver; fi`
	startAPIServer = `if cd /etc/kubernetes/manifests 2>/dev/null; then mv ../kube-apiserver.yaml .
		else rm /run/stopped/kube-apiserver; fi`
)

// withoutAPIServer starts pods while the API server is down. kubelet knows all of them already. The daemon knows the
// first two too; it is restarted before the other two start, and does not know these.
func withoutAPIServer(ctx context.Context, t *testing.T, c *envconf.Config) {
	if os.Getenv(onNode) == "" {
		t.Fatalf("%s is not set: see the Makefile", onNode)
	}
	// kubelet creates no sandbox for a pod before the pod's hostPath folder exists. It needs no API server to find out.
	const base = "/run/sluice-e2e"
	known := map[string]map[string]string{"known": capture, "known-plain": nil}
	unknown := map[string]map[string]string{"unknown": capture, "unknown-plain": nil}
	create := func(pods map[string]map[string]string, dir string) {
		for name, labels := range pods {
			script := "wget -q -O- " + urls(ctx, t, c)[0] + " > /shared/" + name + " && sleep 86400"
			p := newPod(name, namespace, labels, script, "")
			p.Spec.Containers[0].VolumeMounts = []corev1.VolumeMount{{Name: "shared", MountPath: "/shared"}}
			p.Spec.Volumes = []corev1.Volume{{Name: "shared", VolumeSource: corev1.VolumeSource{
				HostPath: &corev1.HostPathVolumeSource{Path: dir, Type: new(corev1.HostPathDirectory)},
			}}}
			must(t, client(c).Create(ctx, p))
		}
		for name := range pods {
			waitFor(ctx, t, "kubelet waits for the folder of "+name, func() (bool, error) {
				return hasEvent(ctx, c, name, "FailedMount", dir)
			})
		}
	}
	t.Cleanup(func() { _, _ = node(context.WithoutCancel(ctx), "rm -rf "+base) })
	create(known, base+"/known")
	create(unknown, base+"/unknown")
	atProxy, atServer := proxyRequests(ctx, t, c), serverRequests(ctx, t, c)

	_, err := nodeNamed(ctx, apiServerNode, stopAPIServer)
	must(t, err)
	stopped := true
	start := func() {
		if stopped {
			stopped = false
			_, err := nodeNamed(context.WithoutCancel(ctx), apiServerNode, startAPIServer)
			must(t, err)
		}
	}
	defer start()
	waitFor(ctx, t, "the API server is down", func() (bool, error) {
		return client(c).Get(ctx, "server", namespace, &corev1.Pod{}) != nil, nil
	})
	waitOnNode := func(wanted, script string) {
		waitFor(ctx, t, wanted, func() (bool, error) {
			_, err := node(ctx, script)
			return err == nil, nil
		})
	}
	_, err = node(ctx, "mkdir -p "+base+"/known")
	must(t, err)
	waitOnNode("pods that the daemon knows complete their requests",
		"cd "+base+"/known && grep hello known && grep hello known-plain")

	_, err = node(ctx, "pkill -9 -x sluiced; mkdir -p "+base+"/unknown")
	must(t, err)
	waitOnNode("pods that the daemon does not know start",
		"cd "+base+"/unknown && test -e unknown && test -e unknown-plain")
	waitOnNode("their capture is provisional",
		`test $(grep -l '"state":"provisional"' /run/sluice/attachments/* | wc -l) = 2`)
	_, err = node(ctx, "cd "+base+"/unknown && test ! -s unknown && test ! -s unknown-plain")
	must(t, err)
	start()
	waitFor(ctx, t, "the API server responds again", func() (bool, error) {
		return client(c).Get(ctx, "server", namespace, &corev1.Pod{}) == nil, nil
	})
	waitOnNode("pods that the daemon did not know complete their requests",
		"cd "+base+"/unknown && grep hello unknown && grep hello unknown-plain")
	waitForRollout(ctx, t, c, system, "sluice")
	wantProxyRequests(ctx, t, c, atProxy, 2) // from the pods with the label
	waitFor(ctx, t, "the server has logged all four requests", func() (bool, error) {
		return serverRequests(ctx, t, c) == atServer+4, nil
	})
	for _, pods := range []map[string]map[string]string{known, unknown} {
		for name := range pods {
			must(t, client(c).Delete(ctx, newPod(name, namespace, nil, "", "")))
		}
	}
}
