package mitmproxy

import (
	"flag"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	"sigs.k8s.io/yaml"

	"github.com/sluice-cni/sluice/integration/testbed"
)

var screenshot = flag.String("screenshot", "", "write a picture of mitmweb to this file")

// TestScreenshot takes a picture of mitmweb in a real browser for the documentation: `make screenshot`. It fails unless
// the page finds the flow of a pod by the pod's name.
func TestScreenshot(t *testing.T) {
	if *screenshot == "" {
		t.Skip("it is for `make screenshot`")
	}
	n := testbed.NewWith(t, "sockets")
	n.MitmproxyVersion = "12.3.1" // as in the example
	serveWorld(t, n)
	const address, password = "127.0.0.1:8081", "sesame"
	args := []string{
		"--set", "confdir=" + testbed.Confdir(n), "--set", "server=false", "--set", "web_open_browser=false",
		"--web-host", "127.0.0.1", "--web-port", "8081", "--set", "web_password=" + password,
		"--set", "sluice_socket=" + n.ProxySocket(), "-s", testbed.Addon(t), "--showhost",
	}
	proxy := testbed.Launch(n.Host, n.Mitmproxy("mitmweb"), append(args, exampleColumns(t)...)...)
	d := n.StartDaemon()
	pods := []*testbed.Pod{n.AddPod("runner1"), n.AddPod("runner2")}
	d.WaitForProxies(1, len(pods))
	for _, pod := range pods {
		m := mitmCase{node: n, proxy: proxy, from: pod.Host, world: testbed.WorldIPv4}
		destination := net.JoinHostPort(m.world, portHTTP)
		url := "http://" + site + "/" + pod.Name()
		if _, err := testbed.Get(testbed.Context(t), m.client(destination, nil), url); err != nil {
			t.Fatal(err)
		}
	}
	n.WaitListening(proxy, address)
	browse := func(args ...string) string {
		cmd := exec.CommandContext(t.Context(), "chromium", append(append([]string{
			"--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
			"--disable-background-networking", "--disable-component-update", "--disable-sync",
			"--user-data-dir=" + t.TempDir(), "--window-size=1280,240", "--virtual-time-budget=5000",
		}, args...), "http://"+address+"/?token="+password+"#/flows?s="+url.PathEscape("~comment ^default/runner1"))...)
		out := new(strings.Builder)
		cmd.Stdout = out
		if err := n.Start(cmd); err != nil {
			t.Fatal(err)
		}
		if err := cmd.Wait(); err != nil {
			t.Fatalf("chromium: %v", err)
		}
		return out.String()
	}
	file, err := filepath.Abs(*screenshot)
	if err != nil {
		t.Fatal(err)
	}
	browse("--screenshot=" + file)
	page := browse("--dump-dom")
	if !strings.Contains(page, site+"/runner1") || strings.Contains(page, site+"/runner2") {
		t.Errorf("the page does not show the flow of one pod alone:\n%s", page)
	}
}

// exampleColumns returns the arguments of the patch for mitmweb that choose the columns.
func exampleColumns(t *testing.T) []string {
	t.Helper()
	data, err := os.ReadFile(filepath.Join("..", "..", "deploy", "mitmproxy", "mitmweb.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	var patch appsv1.DaemonSet
	if err := yaml.Unmarshal(data, &patch); err != nil {
		t.Fatal(err)
	}
	columns := slices.DeleteFunc(patch.Spec.Template.Spec.Containers[0].Args, func(arg string) bool {
		return !strings.HasPrefix(arg, "--set=web_columns=")
	})
	if len(columns) == 0 {
		t.Fatal("the patch for mitmweb chooses no columns")
	}
	return columns
}
