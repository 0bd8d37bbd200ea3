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

// render makes the manifests of the chart, with other values.
func render(ctx context.Context, t *testing.T, values ...string) string {
	t.Helper()
	var args []string
	for _, v := range values {
		args = append(args, "--set", v)
	}
	command := exec.CommandContext(ctx, filepath.Join(deployed, "render.sh"), args...)
	command.Stderr = os.Stderr
	out, err := command.Output()
	must(t, err)
	return images.Replace(string(out))
}

// upstreamKinds lets sluice look for the proxy in each of its ways. The last is the one that it had before.
func upstreamKinds(ctx context.Context, t *testing.T, c *envconf.Config) {
	const up = "config.upstream."
	for _, kind := range []struct {
		says   string
		values []string
	}{
		{"pod app=mitmproxy of this node in mitmproxy, port 8080", []string{up + "protocol=connect", up + "port=8080"}},
		{"service mitmproxy/mitmproxy, port 8080", []string{up + "protocol=connect", up + "port=8080", up + "service.namespace=mitmproxy", up + "service.name=mitmproxy"}},
		{":18080", []string{up + "protocol=connect", up + "address=${HOST_IP}:18080"}},
		{"/proxy.sock", nil},
	} {
		must(t, apply(ctx, c, render(ctx, t, kind.values...)))
		must(t, eventually(ctx, "sluice is rolled out for "+kind.says, func() (bool, error) { return rolledOut(ctx, c, system, "sluice") }))
		must(t, eventually(ctx, "its status says where the proxy is", func() (bool, error) {
			s, err := status(ctx, c)
			return strings.Contains(s.Upstream.Address, kind.says) && s.Upstream.Ready, err
		}))
		checkAsk(ctx, t, c, "captured", true)
	}
}
