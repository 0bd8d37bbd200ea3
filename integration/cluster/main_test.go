package main

import (
	"context"
	"errors"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sluice-cni/sluice/integration/cluster/images"
	"github.com/sluice-cni/sluice/integration/cluster/node"
)

func TestMain(m *testing.M) {
	node.Main()
	os.Exit(m.Run())
}

const workload = `
apiVersion: v1
kind: Pod
metadata: {name: server, labels: {app: server}}
spec:
  terminationGracePeriodSeconds: 0
  containers:
  - name: server
    image: tools:e2e
    command: [httpd, -f, -p, "[::]:8080", -h, /etc]
    readinessProbe: {tcpSocket: {port: 8080}, periodSeconds: 1}
---
apiVersion: v1
kind: Pod
metadata: {name: client}
spec:
  terminationGracePeriodSeconds: 0
  containers:
  - {name: client, image: tools:e2e, command: [sleep, "100000"]}
---
apiVersion: v1
kind: Service
metadata: {name: server}
spec:
  ipFamilyPolicy: PreferDualStack
  selector: {app: server}
  ports: [{port: 80, targetPort: 8080}]
---
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: mitmproxy}
spec:
  selector: {matchLabels: {app: mitmproxy}}
  template:
    metadata: {labels: {app: mitmproxy}}
    spec:
      terminationGracePeriodSeconds: 0
      containers:
      - name: mitmproxy
        image: mitmproxy:e2e
        args: [mitmdump, --listen-port, "8080"]
        ports: [{containerPort: 8080, hostPort: 18080}]
        readinessProbe: {tcpSocket: {port: 8080}, periodSeconds: 1}
---
apiVersion: v1
kind: Service
metadata: {name: mitmproxy}
spec:
  selector: {app: mitmproxy}
  internalTrafficPolicy: Local
  ports: [{port: 8080}]
`

// TestNode brings up two nodes side by side, and on each of them a client, a server and a proxy.
func TestNode(t *testing.T) {
	t.Parallel()
	for name, dualStack := range map[string]bool{"single stack": false, "dual stack": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t, dualStack)
			n.phase("up", func() { n.up(t.Context(), n.programs) })
			n.phase("images", func() {
				n.load(images.Tools())
				n.load(images.Mitmproxy())
			})
			n.phase("workload", func() {
				n.kubectl(workload, "apply", "-f", "-")
				n.kubectl("", "rollout", "status", "daemonset/mitmproxy", "--timeout=2m")
				n.kubectl("", "wait", "--for=condition=Ready", "--timeout=2m", "pod", "--all")
			})
			n.phase("traffic", func() { n.traffic(dualStack) })
			n.phase("deletion", func() {
				n.kubectl("", "delete", "--wait", "daemonset/mitmproxy", "pod/client", "pod/server")
				n.kubectl("", "wait", "--for=delete", "--timeout=1m", "pod", "--all")
				n.eventually("nothing of the pods is left", func() bool {
					return n.exec("ls", "/run/netns") == "world\n" && !strings.Contains(n.exec("ip", "-o", "link"), "veth")
				})
			})
			n.phase("down", n.down)
		})
	}
}

func (n *testNode) traffic(dualStack bool) {
	n.tb.Helper()
	world, worldEnv, err := node.Command(n.Config, true, "busybox", "httpd", "-f", "-p", "[::]:80", "-h", "/etc")
	if err != nil {
		n.tb.Fatal(err)
	}
	server := exec.CommandContext(n.tb.Context(), world[0], world[1:]...)
	server.Env = worldEnv
	if err := server.Start(); err != nil {
		n.tb.Fatal(err)
	}
	n.tb.Cleanup(func() { _ = server.Wait() })

	ips := strings.Fields(n.jsonpath("service/server", "{.spec.clusterIPs[*]}"))
	podIPs := strings.Fields(n.jsonpath("pod/client", "{.status.podIPs[*].ip}"))
	families := 1
	outside := []string{node.WorldIPv4}
	if dualStack {
		families = 2
		outside = append(outside, "["+node.WorldIPv6+"]")
	}
	if len(ips) != families || len(podIPs) != families {
		n.tb.Errorf("the Service has the addresses %v and the pod %v, want %d each", ips, podIPs, families)
	}
	get := func(proxy, url, want string) func() bool {
		return func() bool {
			got, err := n.try("", n.Dir+"/kubectl", "exec", "client", "--", "env", proxy, "timeout", "5", "wget", "-qO-", url)
			return err == nil && strings.TrimSpace(got) == want
		}
	}
	for _, ip := range ips {
		if strings.Contains(ip, ":") {
			ip = "[" + ip + "]"
		}
		n.eventually("a Service answers at "+ip, get("NO=proxy", "http://"+ip+"/hostname", "server"))
	}
	for _, host := range outside {
		n.eventually("the world answers at "+host, get("NO=proxy", "http://"+host+"/hostname", node.Name))
	}
	hostIP := n.jsonpath("pod/client", "{.status.hostIP}")
	n.eventually("the proxy is at its hostPort", get("http_proxy=http://"+hostIP+":18080", "http://"+outside[0]+"/hostname", node.Name))
	proxyIP := n.jsonpath("service/mitmproxy", "{.spec.clusterIP}")
	n.eventually("the proxy is at its local Service", get("http_proxy=http://"+proxyIP+":8080", "http://"+outside[0]+"/hostname", node.Name))
	if log := n.kubectl("", "logs", "daemonset/mitmproxy"); strings.Count(log, "GET http://"+outside[0]) < 2 {
		n.tb.Errorf("the proxy has not seen both requests:\n%s", log)
	}
	token := n.kubectl("", "create", "token", "default")
	if strings.Count(token, ".") != 2 {
		n.tb.Errorf("a token of the ServiceAccount is %q", token)
	}
	if can, _ := n.try("", n.Dir+"/kubectl", "auth", "can-i", "list", "pods", "--as=system:serviceaccount:default:default"); can != "no\n" {
		n.tb.Errorf("may the default ServiceAccount list pods? %q", can)
	}
}

// TestNodeThatFails: a component that does not start is named, its log shown, and nothing is left running.
func TestNodeThatFails(t *testing.T) {
	t.Parallel()
	n := newNode(t, false)
	broken := maps.Clone(n.programs)
	broken["kube-scheduler"] = n.script("echo sorry, not today; exit 3")
	err := n.tryUp(t.Context(), broken)
	if err == nil || !strings.Contains(err.Error(), "kube-scheduler has ended: exit status 3\nsorry, not today") {
		t.Errorf("got %v", err)
	}
	n.expectNothingRuns()
	if _, err := os.Stat(filepath.Join(n.Dir, "root/var/log/node/kube-apiserver.log")); err != nil {
		t.Errorf("the logs are to stay: %v", err)
	}
	n.down()
	n.down()
}

// TestNodeInterrupted: nothing of a node is left when it is not wanted any more before it is up.
func TestNodeInterrupted(t *testing.T) {
	t.Parallel()
	n := newNode(t, false)
	slow := maps.Clone(n.programs)
	slow["kube-scheduler"] = n.script("sleep 1000")
	ctx, cancel := context.WithTimeout(t.Context(), 15*time.Second)
	defer cancel()
	if err := n.tryUp(ctx, slow); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v", err)
	}
	n.expectNothingRuns()
	n.down()
}
