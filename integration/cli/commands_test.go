package cli

import (
	"bytes"
	"encoding/json"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sluice-cni/sluice/integration/testbed"
	"github.com/sluice-cni/sluice/plugin/attach"
)

func TestStatusCommand(t *testing.T) {
	t.Parallel()
	n := testbed.New(t)
	n.World.Serve(testbed.Web, func(c net.Conn) { _, _ = io.Copy(c, c) })
	d := n.StartDaemon()
	socket := "--agent-socket=" + n.AgentSocket()
	const late = `(?s)upstream 127.0.0.1:18080 \(connect\): LATE for .*refused.*no attachments`
	testbed.WantMatch(t, testbed.MustSluiced(t, n, "status", socket), late)

	pod, idle := n.AddPod("busy"), n.AddPod("idle")
	var conns []net.Conn
	for range 3 {
		c, err := pod.Dial(testbed.Context(t), "tcp", testbed.Web)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close() //nolint:errcheck // the test ends
		conns = append(conns, c)
	}
	testbed.Eventually(t, "three connections wait", func() bool { return d.Of(pod).Waiting == 3 })
	row := func(p *testbed.Pod) string {
		return tableRow(t, testbed.MustSluiced(t, n, "status", socket), p)
	}
	short := func(p *testbed.Pod) string { return p.ID[:12] + "/eth0" }
	if got, want := row(pod), pod.String()+" "+short(pod)+" captured 3 0 0"; got != want {
		t.Errorf("while the upstream is late the table has %q, want %q", got, want)
	}

	testbed.StartRecordingProxy(n, testbed.ProxyAddress)
	const message = 1500
	for _, c := range conns[:2] {
		b := bytes.Repeat([]byte("x"), message)
		if _, err := c.Write(b); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(c, b); err != nil {
			t.Fatal(err)
		}
	}
	want := pod.String() + " " + short(pod) + " captured 0 3 6.0k"
	testbed.Eventually(t, "all three are open", func() bool { return d.Of(pod).Open == 3 })
	if got := row(pod); got != want {
		t.Errorf("after two messages and their echoes the table has %q, want %q", got, want)
	}
	const ready = `upstream 127.0.0.1:18080 \(connect\): ready for \d`
	testbed.WantMatch(t, testbed.MustSluiced(t, n, "status", socket), ready)
	if got, want := row(idle), idle.String()+" "+short(idle)+" captured 0 0 0"; got != want {
		t.Errorf("the table has %q, want %q", got, want)
	}

	var s attach.Status
	dec := json.NewDecoder(strings.NewReader(testbed.MustSluiced(t, n, "status", "--json", socket)))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&s); err != nil {
		t.Fatal(err)
	}
	if len(s.Attachments) != 2 || s.Attachments[0].Open != 3 || s.Attachments[0].Bytes != 4*message ||
		!s.Upstream.Ready {
		t.Errorf("as JSON: %s", testbed.JSON(s))
	}
}

// tableRow is a pod's line in the table, with one space between words.
func tableRow(t *testing.T, table string, p *testbed.Pod) string {
	t.Helper()
	const header = "POD ATTACHMENT STATE WAITING OPEN BYTES"
	headed := false
	for line := range strings.Lines(table) {
		words := strings.Fields(line)
		headed = headed || strings.Join(words, " ") == header
		if headed && len(words) > 0 && words[0] == p.String() {
			return strings.Join(words, " ")
		}
	}
	t.Fatalf("no line for %s, or no line %q:\n%s", p, header, table)
	return ""
}

func TestStatusCommandWithoutDaemon(t *testing.T) {
	t.Parallel()
	n := testbed.New(t)
	out, err := n.Sluiced("status", "--agent-socket="+n.AgentSocket())
	if err == nil {
		t.Error("it ended with success")
	}
	testbed.WantMatch(t, out, "sluiced does not answer at "+n.AgentSocket())
}

// TestStatusOfProvisionalPod: the daemon settles provisional pods before its first answer.
func TestStatusOfProvisionalPod(t *testing.T) {
	t.Parallel()
	n := testbed.New(t)
	pod := n.AddPod("early")
	if r := n.Records(); len(r) != 1 || r[0].State != attach.Provisional {
		t.Errorf("recorded: %s", testbed.JSON(r))
	}
	n.StartDaemon()
	table := testbed.MustSluiced(t, n, "status", "--agent-socket="+n.AgentSocket())
	testbed.WantMatch(t, tableRow(t, table, pod), " captured 0 0 0$")
}

// TestWaitCommandGivesUp after its timeout, and says why.
func TestWaitCommandGivesUp(t *testing.T) {
	t.Parallel()
	n := testbed.New(t)
	flags := map[string][]string{
		"without the daemon": {"--agent-socket=" + filepath.Join(n.Dir, "not.sock")},
		"with the daemon":    {"--agent-socket=" + n.AgentSocket()},
		"by itself":          {"--address=" + testbed.ProxyAddress},
	}
	reason := map[string]string{
		"without the daemon": "sluiced does not answer",
		"with the daemon":    "upstream 127.0.0.1:18080 is late",
		"by itself":          "connection refused",
	}
	n.StartDaemon()
	for name, given := range flags {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			args := append([]string{"wait", "--timeout=300ms"}, given...)
			for _, fail := range [][]string{nil, {"--on-timeout=fail"}} {
				out, err := n.Sluiced(append(args, fail...)...)
				if err == nil {
					t.Errorf("%s ended with success", append(args, fail...))
				}
				testbed.WantMatch(t, out, "gave up after .*"+reason[name])
			}
			out, err := n.Sluiced(append(args, "--on-timeout=proceed")...)
			if err != nil {
				t.Errorf("it fails though it proceeds: %v", err)
			}
			testbed.WantMatch(t, out, "proceeding without the upstream after .*"+reason[name])
		})
	}
}

// TestWaitCommandEndsWhenTheUpstreamComes, also if it begins before the daemon.
func TestWaitCommandEndsWhenTheUpstreamComes(t *testing.T) {
	t.Parallel()
	n := testbed.New(t)
	var waiting []*testbed.Program
	for _, from := range []string{"--agent-socket=" + n.AgentSocket(), "--address=" + testbed.ProxyAddress} {
		for _, timeout := range []string{"60s", "0"} {
			waiting = append(waiting, testbed.Launch(n.Host, n.Binary("sluiced"), "wait", "--timeout="+timeout, from))
		}
	}
	n.StartDaemon() // later than the commands
	time.Sleep(200 * time.Millisecond)
	for _, w := range waiting {
		if w.Ended() {
			t.Errorf("it ended before there was an upstream: %s", w.Log())
		}
	}
	testbed.StartRecordingProxy(n, testbed.ProxyAddress)
	for _, w := range waiting {
		testbed.Eventually(t, "it ends", w.Ended)
		testbed.WantMatch(t, w.Log(), "upstream is (there,|ready) after")
	}
	testbed.MustSluiced(t, n, "wait", "--agent-socket="+n.AgentSocket()) // with the upstream there
}

// TestWaitCommandCanBeInterrupted: it ends at SIGTERM, so that a pod can be deleted while it waits.
func TestWaitCommandCanBeInterrupted(t *testing.T) {
	t.Parallel()
	n := testbed.New(t)
	l, err := net.Listen("unix", n.AgentSocket())
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close() //nolint:errcheck // no answer comes from it
	w := testbed.Launch(n.Host, n.Binary("sluiced"), "wait", "--on-timeout=proceed", "--agent-socket="+n.AgentSocket())
	c, err := l.Accept() // a command that has connected handles signals
	if err != nil {
		t.Fatal(err)
	}
	_ = c.Close() // no answer
	w.Stop()
	testbed.WantMatch(t, w.Log(), "gave up after")
}

// TestHelp: every command has a usage text.
// TestInstallRefusesUnservedVersions: with the plugin's entry, every ADD and DEL of the node would fail.
func TestInstallRefusesUnservedVersions(t *testing.T) {
	t.Parallel()
	n := testbed.New(t)
	n.CNIVersion = "0.2.0"
	n.Install()
	out, err := n.Sluiced("install", "--config="+testbed.ConfigFile(t, n.Config),
		"--cni-conf-dir="+n.ConfDir, "--cni-bin-dir="+t.TempDir())
	if err == nil {
		t.Error("it ended with success")
	}
	testbed.WantMatch(t, out, n.ConfFile()+`.*cniVersion is "0.2.0"; set cniVersion to`)
	if got, err := os.ReadFile(n.ConfFile()); err != nil || !bytes.Equal(got, n.Primary()) {
		t.Errorf("the file is now %s, %v", got, err)
	}
	d := n.StartDaemon()
	testbed.Eventually(t, "the daemon says why it is not ready", func() bool {
		return strings.Contains(d.Status().NotReady, `cniVersion is "0.2.0"`)
	})
}

func TestHelp(t *testing.T) {
	t.Parallel()
	n := testbed.New(t)
	for _, command := range []string{"", "run", "check-config", "status", "wait", "install", "uninstall"} {
		args := append(strings.Fields(command), "--help")
		testbed.WantMatch(t, testbed.MustSluiced(t, n, args...), `Usage:\s+sluiced`)
	}
}

func TestMalformedCommandLine(t *testing.T) {
	t.Parallel()
	n := testbed.New(t)
	for _, c := range []struct {
		args  []string
		names string
	}{
		{[]string{"run", "now"}, "now"},
		{[]string{"run", "--log-level", "LOUD"}, "LOUD"},
		{[]string{"status", "--yaml"}, "--yaml"},
		{[]string{"wait", "--timeout", "soon"}, "soon"},
		{[]string{"wait", "--on-timeout", "pray"}, "on-timeout.*pray"},
		{[]string{"dance"}, "dance"},
	} {
		t.Run(strings.Join(c.args, " "), func(t *testing.T) {
			t.Parallel()
			out, err := n.Sluiced(c.args...)
			if err == nil {
				t.Error("it ended with success")
			}
			testbed.WantMatch(t, out, c.names)
		})
	}
}
