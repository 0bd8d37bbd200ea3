package testbed

import (
	"regexp"
	"strconv"
	"strings"
	"testing"
)

var counters = regexp.MustCompile(`(?m)^#.*\n|\[\d+:\d+\]`)

// Rules is every netfilter rule in the netns, without comments and counters.
func (h *Host) Rules() string {
	var b strings.Builder
	b.WriteString(h.Exec("nft", "--stateless", "list", "ruleset"))
	for _, tool := range []string{"iptables-legacy-save", "ip6tables-legacy-save"} {
		b.WriteString(h.Exec(tool))
	}
	return counters.ReplaceAllString(b.String(), "")
}

// Traces is all that sluice has left in the netns: its rules, and listeners on its port.
func (h *Host) Traces() string {
	var found []string
	for line := range strings.Lines(h.Rules()) {
		if strings.Contains(strings.ToLower(line), "sluice") {
			found = append(found, line)
		}
	}
	return strings.Join(found, "") + h.listeners()
}

func (h *Host) listeners() string {
	return h.Exec("ss", "--no-header", "--listening", "--tcp", "--numeric", "sport = :15001")
}

// Queues are the lengths of the accept queues of the netns' capture port, one for each listener.
func (h *Host) Queues() []int {
	var lengths []int
	for line := range strings.Lines(h.listeners()) {
		if w := strings.Fields(line); len(w) > 1 { // "LISTEN 3 4096 0.0.0.0:15001 …"
			length, _ := strconv.Atoi(w[1])
			lengths = append(lengths, length)
		}
	}
	return lengths
}

// Queued is the number of connections in the accept queues of the netns' capture port.
func (h *Host) Queued() int {
	n := 0
	for _, length := range h.Queues() {
		n += length
	}
	return n
}

// WantNoTraces fails the test unless h is as if sluice had never seen it.
func WantNoTraces(t *testing.T, n *Node, h *Host) {
	t.Helper()
	if left := h.Traces(); left != "" {
		t.Errorf("left in the netns:\n%s", left)
	}
	for _, r := range n.Records() {
		if r.Netns == h.Path() {
			t.Errorf("left on disk: a record of %s", r.Attachment)
		}
	}
}

// Flavour is a way to install a ruleset: a backend, or one of its tools.
type Flavour struct {
	Name    string // as attachment records have it
	Backend string // the plugin's configuration
	// Prepare makes the netns of a pod such that this flavour is chosen.
	Prepare func(*Pod)
}

// Flavours are all ways to install a ruleset.
var Flavours = []Flavour{
	{"iptables-nft", "iptables", func(*Pod) {}},
	// A netns in which the legacy tools have been used stays with them.
	{"iptables-legacy", "iptables", func(p *Pod) {
		for _, tool := range []string{"iptables-legacy", "ip6tables-legacy"} {
			p.Exec(tool, "--table", "nat", "--list-rules")
		}
	}},
	{"nftables", "nftables", func(*Pod) {}},
}

// AddPod is Node.AddPod for one flavour. Unless it is nil, change is called before ADD.
func (f Flavour) AddPod(t *testing.T, n *Node, name string, change func(*Pod)) *Pod {
	t.Helper()
	n.Plugin["backend"] = f.Backend
	p := n.NewPod(name)
	f.Prepare(p)
	if change != nil {
		change(p)
	}
	if err := p.Add(); err != nil {
		t.Fatalf("ADD %s: %v", name, Describe(err))
	}
	t.Cleanup(func() { _ = p.Del() })
	for _, r := range n.Records() {
		if r.ContainerID == p.ID && r.Installed != nil && r.Installed.Backend != f.Name {
			t.Errorf("%s was captured with %s, want %s", name, r.Installed.Backend, f.Name)
		}
	}
	return p
}
