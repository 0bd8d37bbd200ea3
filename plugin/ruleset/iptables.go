package ruleset

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// iptablesBackend is one flavour of the iptables tools, named by its command: iptables-nft, iptables-legacy,
// or iptables where there is only one.
type iptablesBackend string

// chainPrefix tells sluice's chains from the built-in ones and from those of other programs.
const chainPrefix = "SLUICE_"

// lockWait bounds how long the tools wait for the xtables lock, in seconds.
const lockWait = 5

func (b iptablesBackend) name() string { return string(b) }

// findIPTables lists the flavours installed here, the best first: the one that already has rules in
// this netns, then the one that the node's administrator made the default.
func findIPTables() []backend {
	var found []backend
	add := func(name string) {
		if path, err := exec.LookPath(name + "-restore"); err == nil {
			if name == "iptables" {
				name = flavour(path)
			}
			if b := iptablesBackend(name); !slices.Contains(found, backend(b)) {
				found = append(found, b)
			}
		}
	}
	// The file lists the tables that the legacy tools use in this netns; absent if the kernel has no such tables.
	if names, err := os.ReadFile("/proc/thread-self/net/ip_tables_names"); err == nil && len(names) > 0 {
		add("iptables-legacy")
	}
	add("iptables")
	add("iptables-nft")
	add("iptables-legacy")
	return found
}

// flavour resolves the alternative that `iptables` stands for now. A record with the resolved name still leads to the
// same rules after the administrator has switched the alternative.
func flavour(path string) string {
	target, err := filepath.EvalSymlinks(path)
	if err != nil {
		return "iptables"
	}
	for _, f := range []string{"nft", "legacy"} {
		if strings.Contains(filepath.Base(target), f) {
			if _, err := exec.LookPath("iptables-" + f + "-restore"); err == nil {
				return "iptables-" + f
			}
		}
	}
	return "iptables"
}

// tool returns the flavour's command for one family.
func (b iptablesBackend) tool(f Family) string {
	if f == IPv6 {
		return strings.Replace(string(b), "iptables", "ip6tables", 1)
	}
	return string(b)
}

// apply first assumes a netns without sluice's chains, since nearly every new pod has such a netns. The document that
// creates the chains fails if one exists, and only then does apply spend the time to read the present state.
func (b iptablesBackend) apply(ctx context.Context, f Family, tables []table) error {
	first := document(f, tables, nil)
	firstErr := b.restore(ctx, f, first)
	if firstErr == nil {
		return nil
	}
	present, err := b.save(ctx, f)
	if err != nil {
		return errors.Join(firstErr, err)
	}
	again := document(f, tables, present)
	if bytes.Equal(first, again) {
		return firstErr
	}
	return b.restore(ctx, f, again)
}

// saved is the rules of a netns as iptables-save prints them: for each table its chains, for each chain its rules.
type saved map[string]map[string][]string

// save reads the present rules.
func (b iptablesBackend) save(ctx context.Context, f Family) (saved, error) {
	name := b.tool(f) + "-save"
	out, err := exec.CommandContext(ctx, name).Output()
	if err != nil {
		var failed *exec.ExitError
		if errors.As(err, &failed) {
			err = fmt.Errorf("%w: %s", err, bytes.TrimSpace(failed.Stderr))
		}
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return parseSaved(string(out)), nil
}

// parseSaved reads lines such as `*nat`, `:OUTPUT ACCEPT [0:0]` and `-A OUTPUT -p tcp -j SLUICE_OUTPUT`.
func parseSaved(text string) saved {
	s := saved{}
	var t map[string][]string
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		words := strings.Fields(line)
		switch {
		case strings.HasPrefix(line, "*"):
			t = map[string][]string{}
			s[line[1:]] = t
		case strings.HasPrefix(line, ":") && t != nil:
			t[words[0][1:]] = nil
		case strings.HasPrefix(line, "-A ") && t != nil && len(words) > 1:
			t[words[1]] = append(t[words[1]], line)
		}
	}
	return s
}

// restore passes a document to iptables-restore, which commits each table in one step.
func (b iptablesBackend) restore(ctx context.Context, f Family, doc []byte) error {
	name := b.tool(f) + "-restore"
	cmd := exec.CommandContext(ctx, name, "--noflush", "--wait", strconv.Itoa(lockWait))
	// A tool that waits for the lock must not install rules after the plugin was killed: DEL may have come meanwhile.
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	cmd.WaitDelay = time.Second // a child of it may hold the output
	cmd.Stdin = bytes.NewReader(doc)
	out, err := cmd.CombinedOutput()
	if err != nil {
		return fmt.Errorf("%s: %w: %s", name, err, explain(doc, out))
	}
	return nil
}

var failedLine = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`line:? (\d+)`) })

// explain adds the rule to the line number in an error of iptables-restore.
func explain(doc, out []byte) string {
	text := strings.Join(strings.Fields(string(out)), " ")
	if m := failedLine().FindStringSubmatch(text); m != nil {
		n, _ := strconv.Atoi(m[1])
		if lines := strings.Split(string(doc), "\n"); 1 <= n && n <= len(lines) {
			text += " (" + lines[n-1] + ")"
		}
	}
	return text
}

// document renders tables for iptables-restore --noflush, for a netns that has the present rules.
func document(f Family, tables []table, present saved) []byte {
	var doc bytes.Buffer
	for _, t := range tables {
		have := present[t.name]
		fmt.Fprintf(&doc, "*%s\n", t.name)
		for _, c := range t.chains {
			if _, ok := have[chainPrefix+c.name]; ok {
				fmt.Fprintf(&doc, ":%s%s - [0:0]\n", chainPrefix, c.name) // flushes the chain
			} else {
				fmt.Fprintf(&doc, "-N %s%s\n", chainPrefix, c.name)
			}
		}
		for _, c := range t.chains {
			for _, r := range c.rules {
				fmt.Fprintf(&doc, "# %s\n%s\n", r.why, appendRule(f, chainPrefix+c.name, r.match, r.target))
			}
		}
		for _, c := range t.chains {
			if c.hook == "" {
				continue
			}
			jump := appendRule(f, c.hook, c.via, jump(c.name))
			rules := have[c.hook]
			if len(rules) > 0 && rules[0] == jump {
				continue
			}
			if slices.Contains(rules, jump) { // not the first: a rule before it may let packets out
				fmt.Fprintf(&doc, "-D%s\n", strings.TrimPrefix(jump, "-A"))
			}
			fmt.Fprintf(&doc, "# %s\n-I%s\n", c.why, strings.TrimPrefix(jump, "-A"))
		}
		doc.WriteString("COMMIT\n")
	}
	return doc.Bytes()
}

// appendRule writes a rule exactly as `iptables -S` prints it, so that check can compare text.
func appendRule(f Family, chain string, m match, t target) string {
	w := []string{"-A", chain}
	add := func(words ...string) { w = append(w, words...) }
	if m.src.IsValid() && m.src.Bits() > 0 {
		add("-s", prefix(m.src))
	}
	if m.dst.IsValid() && m.dst.Bits() > 0 {
		add("-d", prefix(m.dst))
	}
	if m.in != "" {
		add("-i", m.in)
	}
	if m.out != "" {
		add("-o", m.out)
	}
	switch {
	case m.proto == "icmpv6":
		add("-p", "ipv6-icmp")
	case m.proto != "":
		add("-p", m.proto)
	case m.notProto != "":
		add("!", "-p", m.notProto)
	}
	if m.dports != (PortRange{}) || m.syn {
		add("-m", m.proto)
	}
	if m.dports != (PortRange{}) {
		add("--dport", strings.Replace(m.dports.String(), "-", ":", 1))
	}
	if m.syn {
		add("--tcp-flags", "FIN,SYN,RST,ACK", "SYN")
	}
	if m.dstLocal {
		add("-m", "addrtype", "--dst-type", "LOCAL")
	}
	switch m.state {
	case "":
	case ctOriginal, ctReply:
		add("-m", "conntrack", "--ctdir", string(m.state))
	default:
		add("-m", "conntrack", "--ctstate", string(m.state))
	}
	if m.dnat {
		add("-m", "conntrack", "--ctstate", "DNAT")
	}
	if m.letOut {
		add("-m", "connmark", "--mark", fmt.Sprintf("0x%x/0x%x", letOut, letOut))
	}
	if m.inside {
		add("-m", "mark", "--mark", fmt.Sprintf("0x%x/0x%x", inside, inside))
	}
	if m.socket {
		add("-m", "socket", "--nowildcard") // without --nowildcard, listeners on any address do not match
	}
	switch t.verb {
	case verbRedirect:
		add("-j", "REDIRECT", "--to-ports", strconv.Itoa(int(t.to.Port())))
	case verbDNAT:
		add("-j", "DNAT", "--to-destination", t.to.String())
	case verbReject:
		with := map[Family]string{IPv4: "icmp-port-unreachable", IPv6: "icmp6-port-unreachable"}
		add("-j", "REJECT", "--reject-with", with[f])
	case verbJump:
		add("-j", chainPrefix+t.chain)
	default:
		add("-j", string(t.verb))
	}
	return strings.Join(w, " ")
}

// prefix writes an IPv4-compatible IPv6 address as inet_ntop(3) does, with the IPv4 address in dotted decimals.
func prefix(p netip.Prefix) string {
	b := p.Addr().As16()
	if p.Addr().Is6() && [12]byte(b[:12]) == [12]byte{} && (b[12] != 0 || b[13] != 0) {
		return fmt.Sprintf("::%s/%d", netip.AddrFrom4([4]byte(b[12:])), p.Bits())
	}
	return p.String()
}

func (b iptablesBackend) check(ctx context.Context, f Family, tables []table) ([]string, error) {
	present, err := b.save(ctx, f)
	if err != nil {
		return nil, err
	}
	var drift []string
	for _, t := range tables {
		for _, c := range t.chains {
			where := fmt.Sprintf("%s %s %s%s", f, t.name, chainPrefix, c.name)
			if c.hook != "" {
				jump := appendRule(f, c.hook, c.via, jump(c.name))
				switch rules := present[t.name][c.hook]; {
				case !slices.Contains(rules, jump):
					drift = append(drift, fmt.Sprintf("%s %s: missing: %s", f, t.name, jump))
				case rules[0] != jump:
					drift = append(drift, fmt.Sprintf("%s %s: before ours: %s", f, t.name, rules[0]))
				}
			}
			got, ok := present[t.name][chainPrefix+c.name]
			if !ok {
				drift = append(drift, where+": chain missing")
				continue
			}
			want := make([]string, len(c.rules))
			for i, r := range c.rules {
				want[i] = appendRule(f, chainPrefix+c.name, r.match, r.target)
			}
			drift = append(drift, diff(where, got, want)...)
		}
	}
	return drift, nil
}

// remove first assumes that every chain and jump of sluice is present, and reads the present rules only if that fails.
func (b iptablesBackend) remove(ctx context.Context, f Family, tables []table) error {
	complete := saved{}
	for _, t := range tables {
		complete[t.name] = map[string][]string{}
		for _, c := range t.chains {
			complete[t.name][chainPrefix+c.name] = nil
			if c.hook != "" {
				complete[t.name][c.hook] = []string{appendRule(f, c.hook, c.via, jump(c.name))}
			}
		}
	}
	if b.restore(ctx, f, removal(tables, complete)) == nil {
		return nil
	}
	present, err := b.save(ctx, f)
	if err != nil {
		return err
	}
	return b.restore(ctx, f, removal(tables, present))
}

// removal renders the document that deletes every chain of sluice and every jump to one, with any rules in them.
func removal(tables []table, present saved) []byte {
	var doc bytes.Buffer
	for _, t := range slices.Backward(tables) {
		fmt.Fprintf(&doc, "*%s\n", t.name)
		var ours []string
		for name, rules := range present[t.name] {
			if strings.HasPrefix(name, chainPrefix) {
				ours = append(ours, name)
				continue
			}
			for _, r := range rules {
				if strings.Contains(r, "-j "+chainPrefix) {
					fmt.Fprintf(&doc, "-D%s\n", strings.TrimPrefix(r, "-A"))
				}
			}
		}
		slices.Sort(ours)
		for _, verb := range []string{"-F", "-X"} { // the chains refer to each other: flush all, then delete
			for _, name := range ours {
				fmt.Fprintf(&doc, "%s %s\n", verb, name)
			}
		}
		doc.WriteString("COMMIT\n")
	}
	return doc.Bytes()
}

// diff names every rule that is missing, changed or foreign, in chain order.
func diff(where string, got, want []string) []string {
	var drift []string
	for _, w := range want {
		if !slices.Contains(got, w) {
			drift = append(drift, fmt.Sprintf("%s: missing or changed: %s", where, w))
		}
	}
	for _, g := range got {
		if !slices.Contains(want, g) {
			drift = append(drift, fmt.Sprintf("%s: unexpected: %s", where, g))
		}
	}
	if len(drift) == 0 && !slices.Equal(got, want) {
		drift = append(drift, where+": rules out of order or repeated")
	}
	return drift
}
