package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/url"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes"
	"sigs.k8s.io/e2e-framework/pkg/envconf"
)

// attached is the attachment of one pod in the daemon's status.
type attached struct {
	Pod, State, Backend, Trust, Netns string
	Waiting                           int
	Notes                             []string
	Nested                            []struct{ Name, Trust string }
}

// attachment returns the attachment of a pod, given as namespace/name. It is empty if the daemon knows none.
func attachment(ctx context.Context, c *envconf.Config, pod string) (attached, error) {
	s, err := status(ctx, c)
	for _, a := range s.Attachments {
		if a.Pod == pod {
			return a, err
		}
	}
	return attached{}, err
}

// daemonStatus is the output of `sluiced status --json`, with the fields that the tests use.
type daemonStatus struct {
	Upstream struct {
		Address string
		Ready   bool
	}
	NotReady    string
	Attachments []attached
}

func status(ctx context.Context, c *envconf.Config) (s daemonStatus, err error) {
	name, err := only(ctx, c, system, daemonPods)
	if err != nil {
		return s, err
	}
	out, err := inPod(ctx, c, system, name, "sluiced", "status", "--json")
	if err != nil {
		return s, err
	}
	err = json.Unmarshal([]byte(out), &s)
	return s, err
}

// serverRequests counts the requests in the server's log.
func serverRequests(ctx context.Context, t *testing.T, c *envconf.Config) int {
	t.Helper()
	return strings.Count(logs(ctx, t, c, namespace, "server"), "url:/\n")
}

// proxyRequests counts the requests to the server in the log of the proxy on the node home.
func proxyRequests(ctx context.Context, t *testing.T, c *envconf.Config) int {
	t.Helper()
	return proxyRequestsOn(ctx, t, c, home, urls(ctx, t, c)...)
}

// wantAnswer sends a request from the pod to a URL of the server.
func wantAnswer(ctx context.Context, t *testing.T, c *envconf.Config, pod, url string) {
	t.Helper()
	out, err := inPod(ctx, c, namespace, pod, "timeout", "60", "wget", "-q", "-O-", url)
	if err != nil || out != "hello\n" {
		t.Fatalf("request from %s to %s: got %q, %v", pod, url, out, err)
	}
}

// proxyRequestsOn counts the requests to URLs in the log of the proxy on a node.
func proxyRequestsOn(ctx context.Context, t *testing.T, c *envconf.Config, node string, urls ...string) (count int) {
	t.Helper()
	name, err := onlyOn(ctx, c, node, proxies, "app=mitmproxy")
	must(t, err)
	brackets := strings.NewReplacer("[", "", "]", "") // mitmproxy logs an IPv6 address without brackets
	log := brackets.Replace(logs(ctx, t, c, proxies, name))
	for _, url := range urls {
		count += strings.Count(log, "GET "+brackets.Replace(url)+"\n")
	}
	return count
}

// wantProxyRequests checks that the proxy has logged exactly want requests more than before. The proxy logs a request
// after it has sent the response.
func wantProxyRequests(ctx context.Context, t *testing.T, c *envconf.Config, before, want int) {
	t.Helper()
	waitFor(ctx, t, fmt.Sprintf("the proxy has logged %d requests", want), func() (bool, error) {
		return proxyRequests(ctx, t, c) >= before+want, nil
	})
	if got := proxyRequests(ctx, t, c) - before; got != want {
		t.Errorf("the proxy has logged %d requests, want %d", got, want)
	}
}

// wantProxySawAddress checks that the proxy has logged a connection from the pod's own address.
func wantProxySawAddress(ctx context.Context, t *testing.T, c *envconf.Config, pod string) {
	t.Helper()
	var p corev1.Pod
	must(t, client(c).Get(ctx, pod, namespace, &p))
	proxy, err := only(ctx, c, proxies, "app=mitmproxy")
	must(t, err)
	if !strings.Contains(logs(ctx, t, c, proxies, proxy), p.Status.PodIP+":") {
		t.Errorf("the proxy has not seen %s at its own address %s", pod, p.Status.PodIP)
	}
}

// urls returns the URLs of the server: over IPv4 and, in a dual-stack cluster, over IPv6.
func urls(ctx context.Context, t *testing.T, c *envconf.Config) (urls []string) {
	t.Helper()
	var p corev1.Pod
	must(t, client(c).Get(ctx, "server", namespace, &p))
	for _, ip := range p.Status.PodIPs {
		u := url.URL{Scheme: "http", Host: strings.TrimSuffix(net.JoinHostPort(ip.IP, ""), ":"), Path: "/"}
		urls = append(urls, u.String())
	}
	return urls
}

// checkRequests sends a request from a pod to each address of the server. It checks the response, and that the request
// has passed through the proxy if the pod is captured, and only then.
func checkRequests(ctx context.Context, t *testing.T, c *envconf.Config, pod string, captured bool) {
	t.Helper()
	for _, url := range urls(ctx, t, c) {
		before := proxyRequests(ctx, t, c)
		wantAnswer(ctx, t, c, pod, url)
		want := 0
		if captured {
			want = 1
		}
		wantProxyRequests(ctx, t, c, before, want)
	}
}

func logs(ctx context.Context, t *testing.T, c *envconf.Config, namespace, pod string) string {
	t.Helper()
	text, err := containerLogs(ctx, c, namespace, pod, "")
	must(t, err)
	return text
}

// containerLogs returns the log of a container. An empty name means the only container of the pod.
func containerLogs(ctx context.Context, c *envconf.Config, namespace, pod, container string) (string, error) {
	k, err := kubernetes.NewForConfig(c.Client().RESTConfig())
	if err != nil {
		return "", err
	}
	text, err := k.CoreV1().Pods(namespace).GetLogs(pod, &corev1.PodLogOptions{Container: container}).DoRaw(ctx)
	return string(text), err
}

// hasEvent reports whether a pod has an event with the given reason whose message contains the given text.
func hasEvent(ctx context.Context, c *envconf.Config, pod, reason, message string) (bool, error) {
	return hasEventIn(ctx, c, namespace, pod, reason, message)
}

// hasEventIn does the same for any object with events in the given namespace.
func hasEventIn(ctx context.Context, c *envconf.Config, namespace, name, reason, message string) (bool, error) {
	var events corev1.EventList
	if err := client(c).WithNamespace(namespace).List(ctx, &events); err != nil {
		return false, err
	}
	for _, e := range events.Items {
		if e.InvolvedObject.Name == name && e.Reason == reason && strings.Contains(e.Message, message) {
			return true, nil
		}
	}
	return false, nil
}

// daemonPods selects the daemon's pods in the namespace system.
const daemonPods = "app.kubernetes.io/name=sluice"
