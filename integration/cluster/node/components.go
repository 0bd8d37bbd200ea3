package node

import (
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"net/http"
)

// manyRequests raises the client-side rate limits: with the defaults, the controllers wait for most of the start.
var manyRequests = []string{"--kube-api-qps=500", "--kube-api-burst=1000"}

// component is a program that runs on the node for as long as the node runs.
type component struct {
	name string
	args []string
	// ready returns nil when the component is ready.
	ready func(context.Context) error
}

const containerdSocket = "/run/containerd/containerd.sock"

func (c Config) containerd() component {
	listening := func(ctx context.Context) error {
		conn, err := new(net.Dialer).DialContext(ctx, "unix", containerdSocket)
		if err != nil {
			return err
		}
		return conn.Close()
	}
	return component{"containerd", []string{"--config", "/etc/containerd/config.toml"}, listening}
}

func (c Config) etcd() component {
	const client, peer = "http://127.0.0.1:2379", "http://127.0.0.1:2380"
	return component{"etcd", []string{
		"--name", Name,
		"--data-dir", "/run/etcd", // a tmpfs: a cluster for tests does not need to wait for a disk
		"--listen-client-urls", client, "--advertise-client-urls", client,
		"--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", Name + "=" + peer,
	}, answers(client + "/health")}
}

func (c Config) apiserver() component {
	return component{"kube-apiserver", []string{
		fmt.Sprintf("--secure-port=%d", c.Port),
		"--advertise-address=" + nodeIPv4,
		"--etcd-servers=http://127.0.0.1:2379",
		"--authorization-mode=Node,RBAC",
		"--enable-admission-plugins=NodeRestriction",
		// MutatingAdmissionPolicy is on by default in Kubernetes 1.36 and newer.
		"--feature-gates=MutatingAdmissionPolicy=true",
		"--runtime-config=admissionregistration.k8s.io/v1beta1=true",
		"--allow-privileged=true",
		"--client-ca-file=" + kubeDir + "/ca.crt",
		"--tls-cert-file=" + kubeDir + "/apiserver.crt",
		"--tls-private-key-file=" + kubeDir + "/apiserver.key",
		"--kubelet-client-certificate=" + kubeDir + "/apiserver-kubelet-client.crt",
		"--kubelet-client-key=" + kubeDir + "/apiserver-kubelet-client.key",
		"--kubelet-preferred-address-types=InternalIP",
		"--service-account-issuer=https://kubernetes.default.svc",
		"--service-account-key-file=" + kubeDir + "/service-accounts.key",
		"--service-account-signing-key-file=" + kubeDir + "/service-accounts.key",
		"--service-cluster-ip-range=" + c.families(servicesIPv4, servicesIPv6),
	}, answers(c.apiURL() + "/readyz")}
}

func (c Config) controllerManager() component {
	return component{"kube-controller-manager", append([]string{
		"--kubeconfig=" + kubeDir + "/kube-controller-manager.conf",
		"--leader-elect=false",
		"--use-service-account-credentials=true",
		"--root-ca-file=" + kubeDir + "/ca.crt",
		"--service-account-private-key-file=" + kubeDir + "/service-accounts.key",
		"--cluster-signing-cert-file=" + kubeDir + "/ca.crt",
		"--cluster-signing-key-file=" + kubeDir + "/ca.key",
		"--service-cluster-ip-range=" + c.families(servicesIPv4, servicesIPv6),
		"--bind-address=127.0.0.1",
	}, manyRequests...), answers("https://127.0.0.1:10257/healthz")}
}

func (c Config) scheduler() component {
	return component{"kube-scheduler", append([]string{
		"--kubeconfig=" + kubeDir + "/kube-scheduler.conf",
		"--leader-elect=false",
		"--bind-address=127.0.0.1",
	}, manyRequests...), answers("https://127.0.0.1:10259/healthz")}
}

func (c Config) kubelet() component {
	return component{"kubelet", []string{
		"--config=" + kubeDir + "/kubelet.yaml",
		"--kubeconfig=" + kubeDir + "/kubelet.conf",
		"--hostname-override=" + Name,
		"--node-ip=" + c.families(nodeIPv4, nodeIPv6),
	}, answers("http://127.0.0.1:10248/healthz")}
}

func kubeletConfig(c Config) map[string]any {
	return map[string]any{
		"apiVersion":               "kubelet.config.k8s.io/v1beta1",
		"kind":                     "KubeletConfiguration",
		"containerRuntimeEndpoint": "unix://" + containerdSocket,
		"cgroupDriver":             "cgroupfs",
		"cgroupRoot":               "/" + c.cgroup(),
		"failCgroupV1":             false,
		"failSwapOn":               false,
		// The node has no DNS server. A test can run one in the world outside.
		"clusterDNS":    []string{WorldIPv4},
		"clusterDomain": "cluster.local",
		"authentication": map[string]any{
			"anonymous": map[string]any{"enabled": false},
			"webhook":   map[string]any{"enabled": true},
			"x509":      map[string]any{"clientCAFile": kubeDir + "/ca.crt"},
		},
		"authorization": map[string]any{"mode": "Webhook"},
		// The node must not evict pods because the machine's disk or memory is full, and must not collect images: no
		// registry has them.
		"evictionHard": map[string]string{
			"memory.available": "0%", "nodefs.available": "0%", "nodefs.inodesFree": "0%",
			"imagefs.available": "0%", "imagefs.inodesFree": "0%",
		},
		"imageGCHighThresholdPercent": 100,
		"maxPods":                     200,
		"nodeStatusReportFrequency":   "1m",
	}
}

func (c Config) proxy() component {
	args := []string{"--config=" + kubeDir + "/kube-proxy.yaml"}
	return component{"kube-proxy", args, answers("http://127.0.0.1:10256/healthz")}
}

func proxyConfig(c Config) map[string]any {
	return map[string]any{
		"apiVersion":       "kubeproxy.config.k8s.io/v1alpha1",
		"kind":             "KubeProxyConfiguration",
		"clientConnection": map[string]any{"kubeconfig": kubeDir + "/kube-proxy.conf"},
		"hostnameOverride": Name,
		"mode":             "iptables",
		"detectLocalMode":  "ClusterCIDR",
		"clusterCIDR":      c.families(podsIPv4, podsIPv6),
		// Zero leaves these settings as they are: they belong to the machine's kernel, not to the node's netns.
		"conntrack": map[string]any{
			"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s",
		},
	}
}

// families returns the value for IPv4 or, with dual stack, the values for both families, separated by a comma.
func (c Config) families(ipv4, ipv6 string) string {
	if c.DualStack {
		return ipv4 + "," + ipv6
	}
	return ipv4
}

// answers returns a check that succeeds if url responds with status 200.
func answers(url string) func(context.Context) error {
	client := &http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		TLSClientConfig:   &tls.Config{InsecureSkipVerify: true}, // the check sends no secret, and uses only the status
	}}
	return func(ctx context.Context) error {
		request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, http.NoBody)
		if err != nil {
			return err
		}
		response, err := client.Do(request)
		if err != nil {
			return err
		}
		_ = response.Body.Close() // only the status matters
		if response.StatusCode != http.StatusOK {
			return fmt.Errorf("%s: %s", url, response.Status)
		}
		return nil
	}
}
