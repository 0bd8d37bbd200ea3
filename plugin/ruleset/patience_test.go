package ruleset_test

import (
	"os"
	"strings"
	"testing"

	"github.com/sluice-cni/sluice/integration/testbed"
	"github.com/sluice-cni/sluice/plugin/ruleset"
)

// TestPatience: until a pod is known to be captured, only the sysctls of SYNs and of conntrack entries change. A sysctl
// that is beyond the wanted value already keeps its value.
func TestPatience(t *testing.T) {
	t.Parallel()
	h := testbed.NewHost(t, "pod")
	const quick = "net.ipv4.tcp_rto_max_ms"
	if _, err := os.Stat("/proc/sys/net/ipv4/tcp_rto_max_ms"); err != nil {
		t.Skipf("this kernel has no %s", quick)
	}
	get := func(name string) string { return strings.TrimSpace(h.Exec("sysctl", "-n", name)) }
	before := []string{get(quick), get("net.ipv4.tcp_retries2"), get("net.ipv4.tcp_orphan_retries")}
	const conntrack = "net.netfilter.nf_conntrack_tcp_timeout_"
	h.Exec("sysctl", "-qw", conntrack+"last_ack=500000")
	check := func(when, name, want string) {
		t.Helper()
		if got := get(name); got != want {
			t.Errorf("%s: got %s = %s, want %s", when, name, got, want)
		}
	}
	patience := func(captured bool) {
		t.Helper()
		if err := ruleset.Patience(h.Path(), captured); err != nil {
			t.Fatal(err)
		}
	}
	patience(false)
	check("provisional", "net.ipv4.tcp_syn_retries", "127")
	check("provisional", "net.ipv4.tcp_syn_linear_timeouts", "127")
	check("provisional", quick, before[0])
	check("provisional", "net.ipv4.tcp_retries2", before[1])
	check("provisional", "net.ipv4.tcp_orphan_retries", before[2])
	check("provisional", "net.ipv4.tcp_fin_timeout", "120")
	check("provisional", conntrack+"close_wait", get(conntrack+"established"))
	check("provisional", conntrack+"fin_wait", get(conntrack+"established"))
	check("beyond the wanted value", conntrack+"last_ack", "500000")
	check("ended connections", conntrack+"time_wait", "120")
	check("reset connections", conntrack+"close", "10")
	patience(true)
	check("captured", quick, "5000")
	check("captured", "net.ipv4.tcp_retries2", "188")
	check("captured", "net.ipv4.tcp_orphan_retries", "255")
	h.Exec("sysctl", "-qw", quick+"=2000", "net.ipv4.tcp_retries2=250")
	patience(true)
	check("beyond the wanted value", quick, "2000")
	check("beyond the wanted value", "net.ipv4.tcp_retries2", "250")

	end := func() {
		t.Helper()
		if err := ruleset.EndPatience(h.Path()); err != nil {
			t.Fatal(err)
		}
	}
	end()
	check("deleted", "net.ipv4.tcp_orphan_retries", "0")
	check("deleted", quick, "2000")
	h.Exec("sysctl", "-qw", "net.ipv4.tcp_orphan_retries=3")
	end()
	check("the pod's own value, deleted", "net.ipv4.tcp_orphan_retries", "3")
}
