package cni

import (
	"strings"
	"syscall"
	"testing"

	"github.com/sluice-cni/sluice/integration/testbed"
)

// redirectRule is the rule that redirects, as iptables-save prints it.
const redirectRule = "-A SLUICE_GATE -p tcp -j REDIRECT --to-ports 15001"

// drifts are ways in which the rules of a captured pod can come to differ from those that ADD installed.
var drifts = []struct {
	name string
	// commands of iptables and ip6tables of either flavour, or of nft
	iptables, nft []string
	names         string // a pattern of the error of CHECK
}{
	{
		"no redirect", []string{"iptables -t nat -D SLUICE_GATE 2"},
		[]string{"flush chain ip sluice-nat SLUICE_GATE"}, "IPv4.*" + redirectRule,
	},
	{
		"no redirect of IPv6", []string{"ip6tables -t nat -D SLUICE_GATE 2"},
		[]string{"flush chain ip6 sluice-nat SLUICE_GATE"}, "IPv6.*" + redirectRule,
	},
	{
		"no jump", []string{"iptables -t nat -D OUTPUT 1"},
		[]string{"flush chain ip sluice-nat OUTPUT"}, "IPv4.*-A OUTPUT -p tcp -j SLUICE_OUTPUT",
	},
	{
		"no SYN gate", []string{"iptables -t mangle -F SLUICE_INPUT"},
		[]string{"flush chain ip sluice-mangle SLUICE_INPUT"},
		"IPv4.*-A SLUICE_INPUT -p tcp -m tcp --dport 15001 -m conntrack --ctstate DNAT " +
			"-m socket --nowildcard -j RETURN",
	},
	{
		"no nested containers", []string{"ip6tables -t nat -F SLUICE_PREROUTING"},
		[]string{"flush chain ip6 sluice-nat SLUICE_PREROUTING"}, "IPv6.*-A SLUICE_PREROUTING -j SLUICE_OUTBOUND",
	},
	{
		"another port",
		[]string{
			"iptables -t nat -R SLUICE_GATE 2 -p tcp -j REDIRECT --to-ports 15002",
		},
		[]string{
			"flush chain ip sluice-nat SLUICE_GATE",
			"add rule ip sluice-nat SLUICE_GATE meta l4proto tcp redirect to :15002",
		},
		"IPv4.*" + redirectRule,
	},
	{
		"a foreign rule before ours", []string{"iptables -t nat -I OUTPUT -d 198.51.100.10 -j ACCEPT"},
		[]string{"insert rule ip sluice-nat OUTPUT ip daddr 198.51.100.10 accept"},
		"IPv4.*(before ours: -A OUTPUT -d 198.51.100.10/32 -j ACCEPT|not ours)",
	},
	{
		"a foreign rule among ours", []string{"iptables -t nat -I SLUICE_OUTPUT -d 198.51.100.10 -j ACCEPT"},
		[]string{"insert rule ip sluice-nat SLUICE_OUTPUT ip daddr 198.51.100.10 accept"},
		"IPv4.*(unexpected: -A SLUICE_OUTPUT -d 198.51.100.10/32 -j ACCEPT|not ours)",
	},
	{
		"no chain",
		[]string{
			"ip6tables -t nat -F SLUICE_OUTPUT", "ip6tables -t nat -D OUTPUT 1", "ip6tables -t nat -X SLUICE_OUTPUT",
		},
		[]string{"delete table ip6 sluice-nat"}, "IPv6.*SLUICE_OUTPUT: .*missing",
	},
}

// TestCheckNamesDrift: its error has the rule that differs.
func TestCheckNamesDrift(t *testing.T) {
	t.Parallel()
	for _, f := range testbed.Flavours {
		t.Run(f.Name, func(t *testing.T) {
			t.Parallel()
			n := testbed.New(t)
			serveWeb(n)
			daemon := n.StartDaemon()
			pod := f.AddPod(t, n, "drifting", nil)
			for _, d := range drifts {
				t.Run(d.name, func(t *testing.T) {
					if err := pod.Check(); err != nil {
						t.Fatalf("CHECK before: %s", testbed.Describe(err))
					}
					daemon.Freeze() // it would repair it
					tamper(pod, f, d.iptables, d.nft)
					testbed.WantErrorLike(t, pod.Check(), d.names)
					daemon.Signal(syscall.SIGCONT)
					callFor(n, pod).must(t, "ADD") // repairs it
				})
			}
			if err := pod.Check(); err != nil {
				t.Errorf("CHECK after: %s", testbed.Describe(err))
			}
			testbed.WantCaller(t, pod.Host, testbed.Web, testbed.NodeIPv4)
		})
	}
}

// tamper changes the pod's rules with the tools of the flavour.
func tamper(pod *testbed.Pod, f testbed.Flavour, iptables, nft []string) {
	if f.Backend == "nftables" {
		for _, command := range nft {
			pod.Exec("nft", command)
		}
		return
	}
	for _, command := range iptables {
		w := strings.Fields(command) // iptables becomes iptables-nft or iptables-legacy
		pod.Exec(w[0]+strings.TrimPrefix(f.Name, "iptables"), w[1:]...)
	}
}

// TestCheckNamesMissingParts: listeners, the record, and the netns that was recorded.
func TestCheckNamesMissingParts(t *testing.T) {
	t.Parallel()
	for _, f := range testbed.Flavours {
		t.Run(f.Name, func(t *testing.T) {
			t.Parallel()
			n := testbed.New(t)
			d := n.StartDaemon()
			pod := f.AddPod(t, n, "checked", nil)
			if err := pod.Check(); err != nil {
				t.Errorf("CHECK after ADD: %s", testbed.Describe(err))
			}
			d.Kill()
			const noListeners = "nothing listens on tcp port 15001.*nothing listens on tcp6 port 15001"
			testbed.WantErrorLike(t, pod.Check(), noListeners)
			n.StartDaemon()
			if err := pod.Check(); err != nil {
				t.Errorf("CHECK with the daemon back: %s", testbed.Describe(err))
			}
			other := n.NewPod("other")
			_, err := callFor(n, other).run(t, "CHECK")
			testbed.WantErrorLike(t, err, "never recorded")
			_, err = callFor(n, pod).with(func(c *call) { c.netns = other.Path() }).run(t, "CHECK")
			testbed.WantErrorLike(t, err, "not the one")
			callFor(n, pod).must(t, "DEL")
			_, err = callFor(n, pod).run(t, "CHECK")
			testbed.WantErrorLike(t, err, "never recorded")
		})
	}
}

// TestCheckNamesListenersAndSysctls: CHECK sees another process at a capture port, a missing inbound listener, a sysctl
// that was changed, and an IPv6 address that came later.
func TestCheckNamesListenersAndSysctls(t *testing.T) {
	t.Parallel()
	n := testbed.New(t)
	daemon := n.StartDaemon()
	pod := n.NewPod("listening")
	n.Annotated(map[string]string{"sluice.dev/capture-inbound-ports": "80"})(pod)
	if err := pod.Add(); err != nil {
		t.Fatal(testbed.Describe(err))
	}
	t.Cleanup(func() { _ = pod.Del() })
	if err := pod.Check(); err != nil {
		t.Fatal(testbed.Describe(err))
	}
	pod.Exec("sysctl", "-qw", "net.ipv4.tcp_syn_retries=3")
	testbed.WantErrorLike(t, pod.Check(), "sysctl net/ipv4/tcp_syn_retries is 3, and was set to 127")
	pod.Exec("sysctl", "-qw", "net.ipv4.tcp_syn_retries=127")

	daemon.Kill()
	testbed.WantErrorLike(t, pod.Check(), "nothing listens on tcp port 15001.*nothing listens on tcp port 15006")
	p := testbed.Launch(pod.Host, n.Binary("connectproxy"), "-listen", "0.0.0.0:15001")
	testbed.Eventually(t, "a process in the pod listens", func() bool {
		return strings.Contains(pod.Exec("ss", "-Hlnt", "sport = :15001"), "LISTEN")
	})
	testbed.WantErrorLike(t, pod.Check(), "a process in the pod listens on tcp6? port 15001")
	p.Kill()

	// An address that comes while the daemon is down, so that it cannot bring the rules in line.
	pod.IP("addr", "add", "2001:db8:77::7/64", "dev", "eth0", "nodad")
	pod.IP("addr", "del", pod.IPv6+"/64", "dev", "eth0")
	_, err := callFor(n, pod).run(t, "CHECK")
	testbed.WantErrorLike(t, err, "2001:db8:77::7")
}
