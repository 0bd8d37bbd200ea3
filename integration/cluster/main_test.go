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

// TestNode runs two nodes side by side, each with a client, a server and a proxy.
func TestNode(t *testing.T) {
	t.Parallel()
	for name, dualStack := range map[string]bool{"single stack": false, "dual stack": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t, dualStack)
			n.phase("up", func() { n.up(t.Context(), n.programs) })
			n.phase("images", func() {
				n.load(images.Tools())
				n.load(images.Mitmproxy("../../bin/mitmproxy/12.3.1"))
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
				n.eventually("no netns and no veth of a pod remains", func() bool {
					netns, links := n.exec("ls", "/run/netns"), n.exec("ip", "-o", "link")
					return netns == "world\n" && !strings.Contains(links, "veth")
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
		n.tb.Errorf("the Service has the addresses %v and the pod has %v, want %d each", ips, podIPs, families)
	}
	get := func(proxy, url, want string) func() bool {
		return func() bool {
			got, err := n.try("", n.Dir+"/kubectl", "exec", "client", "--",
				"env", proxy, "timeout", "5", "wget", "-qO-", url)
			return err == nil && strings.TrimSpace(got) == want
		}
	}
	for _, ip := range ips {
		if strings.Contains(ip, ":") {
			ip = "[" + ip + "]"
		}
		n.eventually("the Service responds at "+ip, get("NO=proxy", "http://"+ip+"/hostname", "server"))
	}
	for _, host := range outside {
		n.eventually("the world responds at "+host, get("NO=proxy", "http://"+host+"/hostname", node.Name))
	}
	hostname := "http://" + outside[0] + "/hostname"
	hostPort := "http_proxy=http://" + n.jsonpath("pod/client", "{.status.hostIP}") + ":18080"
	n.eventually("the proxy responds at its hostPort", get(hostPort, hostname, node.Name))
	service := "http_proxy=http://" + n.jsonpath("service/mitmproxy", "{.spec.clusterIP}") + ":8080"
	n.eventually("the proxy responds at its local Service", get(service, hostname, node.Name))
	if log := n.kubectl("", "logs", "daemonset/mitmproxy"); strings.Count(log, "GET http://"+outside[0]) < 2 {
		n.tb.Errorf("the proxy has not seen both requests:\n%s", log)
	}
	token := n.kubectl("", "create", "token", "default")
	if strings.Count(token, ".") != 2 {
		n.tb.Errorf("the token of the ServiceAccount is %q, want three parts separated by dots", token)
	}
	can, _ := n.try("", n.Dir+"/kubectl", "auth", "can-i", "list", "pods",
		"--as=system:serviceaccount:default:default") // exits with 1 for "no"
	if can != "no\n" {
		n.tb.Errorf("kubectl auth can-i, for the default ServiceAccount to list pods: got %q, want no", can)
	}
}

// TestNodeThatFails checks that the error names a component that does not start and contains its log, and that no
// process remains.
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
		t.Errorf("the logs should remain: %v", err)
	}
	n.down()
	n.down()
}

// TestNodeInterrupted checks that no process of a node remains when the context ends before the node is up.
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
