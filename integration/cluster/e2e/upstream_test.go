package e2e

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"sigs.k8s.io/e2e-framework/pkg/envconf"
)

// render renders the manifests of the chart with changed values, each given as KEY=VALUE.
func render(ctx context.Context, t *testing.T, values ...string) string {
	t.Helper()
	var args []string
	for _, v := range values {
		args = append(args, "--set", v)
	}
	return renderChart(ctx, t, args...)
}

// renderChart renders the manifests with arguments for `helm template`.
func renderChart(ctx context.Context, t *testing.T, args ...string) string {
	t.Helper()
	command := exec.CommandContext(ctx, filepath.Join(deployed, "render.sh"), args...)
	command.Stderr = os.Stderr
	out, err := command.Output()
	must(t, err)
	return images.Replace(string(out))
}

// proxyService leads to the example proxy's pod on the same node.
const proxyService = `
apiVersion: v1
kind: Service
metadata: {name: mitmproxy, namespace: mitmproxy}
spec:
  selector: {app: mitmproxy}
  internalTrafficPolicy: Local
  ports: [{name: proxy, port: 8080, targetPort: proxy}]
`

// upstreamKinds configures each way in which sluice can find the proxy. The last one is the default, which was in use
// before.
func upstreamKinds(ctx context.Context, t *testing.T, c *envconf.Config) {
	makeExplicit(ctx, t, c)
	defer makeImplicit(ctx, t, c)
	must(t, apply(ctx, c, proxyService))
	const up = "config.upstream."
	for _, kind := range []struct {
		address string // part of the address in the daemon's status
		values  []string
	}{
		{
			"pod with app=mitmproxy in namespace mitmproxy on this node, port 8080",
			[]string{up + "protocol=connect", up + "port=8080"},
		},
		{
			"service mitmproxy/mitmproxy, port 8080",
			[]string{
				up + "protocol=connect", up + "port=8080",
				up + "service.namespace=mitmproxy", up + "service.name=mitmproxy",
			},
		},
		{":18080", []string{up + "protocol=connect", up + "address=${HOST_IP}:18080"}},
		{"/proxy.sock", nil},
	} {
		must(t, apply(ctx, c, render(ctx, t, kind.values...)))
		waitForRollout(ctx, t, c, system, "sluice")
		waitFor(ctx, t, "the daemon's status names the upstream as "+kind.address, func() (bool, error) {
			s, err := status(ctx, c)
			return strings.Contains(s.Upstream.Address, kind.address) && s.Upstream.Ready, err
		})
		checkRequests(ctx, t, c, "captured", true)
	}
}
