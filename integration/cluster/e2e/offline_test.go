package e2e

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/e2e-framework/pkg/envconf"
)

// onNode names the command that runs a shell command on the node, whether the API server is there or not: the end of
// its own words is the shell command.
const onNode = "E2E_ON_NODE"

// The API server is a static pod, as on kind, or the program that integration/cluster keeps running.
const (
	stopAPIServer = `if cd /etc/kubernetes/manifests 2>/dev/null; then mv kube-apiserver.yaml ..
		else touch /run/stopped/kube-apiserver; pkill -9 kube-apiserver; fi`
	startAPIServer = `if cd /etc/kubernetes/manifests 2>/dev/null; then mv ../kube-apiserver.yaml .
		else rm /run/stopped/kube-apiserver; fi`
)

func node(ctx context.Context, script string) (string, error) {
	words := append(strings.Fields(os.Getenv(onNode)), script)
	out, err := exec.CommandContext(ctx, words[0], words[1:]...).CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("on the node, %s: %w: %s", script, err, out)
	}
	return string(out), nil
}

// withoutAPIServer starts pods, of which kubelet knows already, while the API server is away: first with a daemon
// that knows them too, then with one that started after it had gone.
func withoutAPIServer(ctx context.Context, t *testing.T, c *envconf.Config) {
	if os.Getenv(onNode) == "" {
		t.Fatalf("%s is not set: see the Makefile", onNode)
	}
	// kubelet makes no sandbox for a pod before the directory is there that the pod wants, and asks nobody then.
	const base = "/run/sluice-e2e"
	known := map[string]map[string]string{"known": capture, "known-plain": nil}
	unknown := map[string]map[string]string{"unknown": capture, "unknown-plain": nil}
	create := func(pods map[string]map[string]string, dir string) {
		for name, labels := range pods {
			p := newPod(name, namespace, labels, "wget -q -O- "+urls(ctx, t, c)[0]+" > /gate/"+name+" && sleep 86400", "")
			p.Spec.Containers[0].VolumeMounts = []corev1.VolumeMount{{Name: "gate", MountPath: "/gate"}}
			p.Spec.Volumes = []corev1.Volume{{Name: "gate", VolumeSource: corev1.VolumeSource{
				HostPath: &corev1.HostPathVolumeSource{Path: dir, Type: new(corev1.HostPathDirectory)},
			}}}
			must(t, client(c).Create(ctx, p))
		}
		for name := range pods {
			must(t, eventually(ctx, "kubelet waits for the directory of "+name, func() (bool, error) { return told(ctx, c, name, "FailedMount", dir) }))
		}
	}
	t.Cleanup(func() { _, _ = node(context.WithoutCancel(ctx), "rm -rf "+base) })
	create(known, base+"/known")
	create(unknown, base+"/unknown")
	seen, asked := seenByProxy(ctx, t, c), askedBy(ctx, t, c)

	_, err := node(ctx, stopAPIServer)
	must(t, err)
	stopped := true
	start := func() {
		if stopped {
			stopped = false
			_, err := node(context.WithoutCancel(ctx), startAPIServer)
			must(t, err)
		}
	}
	defer start()
	must(t, eventually(ctx, "the API server is away", func() (bool, error) {
		return client(c).Get(ctx, "server", namespace, &corev1.Pod{}) != nil, nil
	}))
	onDisk := func(what, script string) {
		must(t, eventually(ctx, what, func() (bool, error) {
			_, err := node(ctx, script)
			return err == nil, nil
		}))
	}
	_, err = node(ctx, "mkdir -p "+base+"/known")
	must(t, err)
	onDisk("pods that the daemon knows complete their requests", "cd "+base+"/known && grep hello known && grep hello known-plain")

	_, err = node(ctx, "pkill -9 -x sluiced; mkdir -p "+base+"/unknown")
	must(t, err)
	onDisk("pods that the daemon does not know start", "cd "+base+"/unknown && test -e unknown && test -e unknown-plain")
	onDisk("their capture is provisional", `test $(grep -l '"state":"provisional"' /run/sluice/attachments/* | wc -l) = 2`)
	_, err = node(ctx, "cd "+base+"/unknown && test ! -s unknown && test ! -s unknown-plain")
	must(t, err)
	start()
	must(t, eventually(ctx, "the API server is back", func() (bool, error) {
		return client(c).Get(ctx, "server", namespace, &corev1.Pod{}) == nil, nil
	}))
	onDisk("they complete theirs when it is back", "cd "+base+"/unknown && grep hello unknown && grep hello unknown-plain")
	must(t, eventually(ctx, "the daemon is ready", func() (bool, error) { return rolledOut(ctx, c, system, "sluice") }))
	wantSeen(ctx, t, c, seen, 2) // those of the labelled pods
	must(t, eventually(ctx, "the server has logged all four requests", func() (bool, error) { return askedBy(ctx, t, c) == asked+4, nil }))
	for _, pods := range []map[string]map[string]string{known, unknown} {
		for name := range pods {
			must(t, client(c).Delete(ctx, newPod(name, namespace, nil, "", "")))
		}
	}
}
