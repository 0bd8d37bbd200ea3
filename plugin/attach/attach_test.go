package attach_test

import (
	"bytes"
	"encoding/json"
	"net/netip"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sluice-cni/sluice/integration/testbed"
	"github.com/sluice-cni/sluice/plugin/attach"
	"github.com/sluice-cni/sluice/plugin/ruleset"
)

func TestMain(m *testing.M) { os.Exit(testbed.Main(m)) }

func TestValidateID(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct{ containerID, ifName, want string }{
		{"4f2a", "eth0", ""},
		{"A.b_c-d", "net1", ""},
		{strings.Repeat("a", 200), "eth0", ""},
		{"", "eth0", `container ID ""`},
		{strings.Repeat("a", 201), "eth0", "container ID"},
		{".hidden", "eth0", `container ID ".hidden"`},
		{"-x", "eth0", `container ID "-x"`},
		{"../../etc/passwd", "eth0", "container ID"},
		{"a/b", "eth0", `container ID "a/b"`},
		{"a:b", "eth0", `container ID "a:b"`},
		{"a\n", "eth0", "container ID"},
		{"4f2a", "", `"" is not an interface name`},
		{"4f2a", "../x", `"../x" is not an interface name`},
		{"4f2a", "eth+", `"eth+" is not an interface name`},
	} {
		id := attach.ID{ContainerID: tc.containerID, IfName: tc.ifName}
		checkError(t, id.String(), id.Validate(), tc.want)
		if got, err := attach.ParseID(id.String()); tc.want == "" && (err != nil || got != id) {
			t.Errorf("ParseID(%q): got %v, %v; want %v", id.String(), got, err, id)
		}
	}
	for _, s := range []string{"", "4f2a", "/eth0", "4f2a/eth0/x"} {
		if got, err := attach.ParseID(s); err == nil {
			t.Errorf("ParseID(%q): got %v, want an error", s, got)
		}
	}
}

func TestValidatePod(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		pod  attach.Pod
		want string
	}{
		{attach.Pod{}, ""},
		{attach.Pod{Namespace: "ci", Name: "web-0.x_1", UID: "7d3f"}, ""},
		{attach.Pod{Name: strings.Repeat("a", 253)}, ""},
		{attach.Pod{Name: strings.Repeat("a", 254)}, "pod name"},
		{attach.Pod{Namespace: "a b"}, `pod namespace "a b"`},
		{attach.Pod{Name: "a\r\nX: y"}, `pod name "a\r\nX: y"`},
		{attach.Pod{UID: "a/b"}, `pod UID "a/b"`},
		{attach.Pod{Name: "é"}, `pod name "é"`},
	} {
		checkError(t, tc.pod.String(), tc.pod.Validate(), tc.want)
	}
}

func TestValidateAttachment(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		change func(*attach.Attachment)
		want   string
	}{
		"whole":    {func(*attach.Attachment) {}, ""},
		"no netns": {func(a *attach.Attachment) { a.Netns = "" }, "no netns path"},
		"bad ID":   {func(a *attach.Attachment) { a.ContainerID = "" }, "container ID"},
		"bad pod":  {func(a *attach.Attachment) { a.Pod.Name = "a b" }, "pod name"},
	} {
		a := record("4f2a", "eth0").Attachment
		tc.change(&a)
		checkError(t, name, a.Validate(), tc.want)
	}
}

func TestNames(t *testing.T) {
	t.Parallel()
	a := record("4f2a", "eth0").Attachment
	got := []string{
		a.ID.String(), a.Pod.String(), a.String(), attach.Pod{}.String(), attach.Attachment{ID: a.ID}.String(),
	}
	want := []string{"4f2a/eth0", "ci/web-0", "ci/web-0 (4f2a/eth0)", "-", "4f2a/eth0"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// record makes a record with every field set.
func record(containerID, ifName string) attach.Record {
	return attach.Record{
		Attachment: attach.Attachment{
			ID:      attach.ID{ContainerID: containerID, IfName: ifName},
			Network: "pods", Netns: "/run/netns/" + containerID,
			Pod:         attach.Pod{Namespace: "ci", Name: "web-0", UID: "7d3f"},
			IPs:         []netip.Addr{netip.MustParseAddr("10.0.0.5"), netip.MustParseAddr("fd00::5")},
			Annotations: map[string]string{"sluice.dev/quic": "allow"},
		},
		NetnsID: attach.NetnsID{Dev: 4, Ino: 4026532177, Cookie: 1 << 63},
		State:   attach.Captured,
		Installed: &ruleset.Installed{
			Ruleset: ruleset.Provisional(ifName), Backend: "iptables-nft", SYNGate: true, IPv6: true,
		},
	}
}

// same compares records by their JSON, as netip types have no exported fields.
var same = cmp.Comparer(func(a, b attach.Record) bool {
	x, xerr := json.Marshal(a)
	y, yerr := json.Marshal(b)
	return xerr == nil && yerr == nil && bytes.Equal(x, y)
})

func checkError(t *testing.T, subject string, err error, want string) {
	t.Helper()
	if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
		t.Errorf("%s: got error %v, want %q", subject, err, want)
	}
}
