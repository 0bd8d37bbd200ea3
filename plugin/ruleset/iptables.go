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

	"github.com/coreos/go-iptables/iptables"
)

// iptablesBackend is one flavour of the iptables tools; its name is that of the command:
// iptables-nft, iptables-legacy, or iptables where there is only one.
type iptablesBackend string

// chainPrefix keeps our chains apart from the built-in ones and from anybody else's.
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
	// Tables that the legacy tools use in this netns; absent where the kernel has none.
	if names, err := os.ReadFile("/proc/thread-self/net/ip_tables_names"); err == nil && len(names) > 0 {
		add("iptables-legacy")
	}
	add("iptables")
	add("iptables-nft")
	add("iptables-legacy")
	return found
}

// flavour resolves the alternative that `iptables` stands for today, so that what is recorded still
// names the same rules when the alternative is switched.
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

// tool is the flavour's command for one family.
func (b iptablesBackend) tool(f Family) string {
	if f == IPv6 {
		return strings.Replace(string(b), "iptables", "ip6tables", 1)
	}
	return string(b)
}

// apply assumes a netns without our chains, as nearly every pod's is: the document that creates them
// fails without them being new, and only then is it worth looking at what is there.
func (b iptablesBackend) apply(ctx context.Context, f Family, tables []table) error {
	fresh := func(table) (tableState, error) { return tableState{}, nil }
	first, err := document(f, tables, fresh)
	if err != nil {
		return err
	}
	ferr := b.restore(ctx, f, first)
	if ferr == nil {
		return nil
	}
	again, err := document(f, tables, func(t table) (tableState, error) { return b.look(f, t) })
	if err != nil {
		return errors.Join(ferr, err)
	}
	if bytes.Equal(first, again) {
		return ferr
	}
	return b.restore(ctx, f, again)
}

// tableState is what one table holds of ours: our chains, and for each built-in chain its rules as
// `iptables -S` prints them.
type tableState struct {
	chains map[string]bool
	hooks  map[string][]string
}

func (b iptablesBackend) look(f Family, t table) (tableState, error) {
	state := tableState{map[string]bool{}, map[string][]string{}}
	ipt, err := b.open(f)
	if err != nil {
		return state, err
	}
	names, err := ipt.ListChains(t.name)
	if err != nil {
		return state, fmt.Errorf("listing %s table %s: %w", f, t.name, err)
	}
	for _, name := range names {
		state.chains[name] = strings.HasPrefix(name, chainPrefix)
	}
	for _, c := range t.chains {
		if c.hook == "" {
			continue
		}
		if state.hooks[c.hook], err = b.list(ipt, f, t.name, c.hook); err != nil {
			return state, err
		}
	}
	return state, nil
}

func (b iptablesBackend) open(f Family) (*iptables.IPTables, error) {
	proto := iptables.ProtocolIPv4
	if f == IPv6 {
		proto = iptables.ProtocolIPv6
	}
	ipt, err := iptables.New(iptables.IPFamily(proto), iptables.Path(b.tool(f)), iptables.Timeout(lockWait))
	if err != nil {
		return nil, fmt.Errorf("finding %s: %w", b.tool(f), err)
	}
	return ipt, nil
}

// list is the rules of one chain, without the line that declares it.
func (b iptablesBackend) list(ipt *iptables.IPTables, f Family, table, chain string) ([]string, error) {
	lines, err := ipt.List(table, chain)
	if err != nil {
		return nil, fmt.Errorf("listing %s table %s chain %s: %w", f, table, chain, err)
	}
	return slices.DeleteFunc(lines, func(l string) bool { return !strings.HasPrefix(l, "-A ") }), nil
}

// restore hands a document to iptables-restore. Each table of it is replaced in one step.
func (b iptablesBackend) restore(ctx context.Context, f Family, doc []byte) error {
	name := b.tool(f) + "-restore"
	cmd := exec.CommandContext(ctx, name, "--noflush", "--wait", strconv.Itoa(lockWait))
	cmd.Stdin = bytes.NewReader(doc)
	out, err := cmd.CombinedOutput()
	if err != nil {
		return fmt.Errorf("%s: %w: %s", name, err, explain(doc, out))
	}
	return nil
}

var failedLine = regexp.MustCompile(`line:? (\d+)`)

// explain puts the rule beside the number of the line that iptables-restore complains about.
func explain(doc, out []byte) string {
	text := strings.Join(strings.Fields(string(out)), " ")
	if m := failedLine.FindStringSubmatch(text); m != nil {
		n, _ := strconv.Atoi(m[1])
		if lines := strings.Split(string(doc), "\n"); 1 <= n && n <= len(lines) {
			text += " (" + lines[n-1] + ")"
		}
	}
	return text
}

// document renders tables for iptables-restore --noflush. state tells what of them is there already.
func document(f Family, tables []table, state func(table) (tableState, error)) ([]byte, error) {
	var doc bytes.Buffer
	for _, t := range tables {
		have, err := state(t)
		if err != nil {
			return nil, err
		}
		fmt.Fprintf(&doc, "*%s\n", t.name)
		for _, c := range t.chains {
			if have.chains[chainPrefix+c.name] {
				fmt.Fprintf(&doc, ":%s%s - [0:0]\n", chainPrefix, c.name) // flushes it
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
			jump := appendRule(f, c.hook, c.via, target(c.name))
			rules := have.hooks[c.hook]
			if len(rules) > 0 && rules[0] == jump {
				continue
			}
			if slices.Contains(rules, jump) { // behind a rule that may let packets go
				fmt.Fprintf(&doc, "-D%s\n", strings.TrimPrefix(jump, "-A"))
			}
			fmt.Fprintf(&doc, "# %s\n-I%s\n", c.why, strings.TrimPrefix(jump, "-A"))
		}
		doc.WriteString("COMMIT\n")
	}
	return doc.Bytes(), nil
}

// appendRule writes a rule exactly as `iptables -S` prints it, so that listing is enough to check.
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
	if m.proto != "" {
		add("-p", m.proto)
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
	if m.invalid {
		add("-m", "conntrack", "--ctstate", "INVALID")
	}
	if m.dnat {
		add("-m", "conntrack", "--ctstate", "DNAT")
	}
	if m.direct {
		add("-m", "conntrack", "--ctstate", "NEW", "-m", "connmark", "--mark", fmt.Sprintf("0x%x", DirectMark))
	}
	if m.socket {
		add("-m", "socket", "--nowildcard") // listeners bound to any address count too
	}
	switch t {
	case targetReturn, targetDrop:
		add("-j", string(t))
	case targetOutbound, targetInbound:
		add("-j", "REDIRECT", "--to-ports", strconv.Itoa(int(redirects[t])))
	case targetReject:
		with := map[Family]string{IPv4: "icmp-port-unreachable", IPv6: "icmp6-port-unreachable"}
		add("-j", "REJECT", "--reject-with", with[f])
	default:
		add("-j", chainPrefix+string(t))
	}
	return strings.Join(w, " ")
}

// prefix writes an IPv6 address that has an IPv4 one in it as inet_ntop(3) does.
func prefix(p netip.Prefix) string {
	b := p.Addr().As16()
	if p.Addr().Is6() && [12]byte(b[:12]) == [12]byte{} && (b[12] != 0 || b[13] != 0) {
		return fmt.Sprintf("::%s/%d", netip.AddrFrom4([4]byte(b[12:])), p.Bits())
	}
	return p.String()
}

func (b iptablesBackend) check(_ context.Context, f Family, tables []table) ([]string, error) {
	ipt, err := b.open(f)
	if err != nil {
		return nil, err
	}
	var drift []string
	for _, t := range tables {
		state, err := b.look(f, t)
		if err != nil {
			return nil, err
		}
		for _, c := range t.chains {
			where := fmt.Sprintf("%s %s %s%s", f, t.name, chainPrefix, c.name)
			if c.hook != "" {
				jump := appendRule(f, c.hook, c.via, target(c.name))
				switch rules := state.hooks[c.hook]; {
				case !slices.Contains(rules, jump):
					drift = append(drift, fmt.Sprintf("%s %s: missing: %s", f, t.name, jump))
				case rules[0] != jump:
					drift = append(drift, fmt.Sprintf("%s %s: before ours: %s", f, t.name, rules[0]))
				}
			}
			if !state.chains[chainPrefix+c.name] {
				drift = append(drift, where+": chain missing")
				continue
			}
			got, err := b.list(ipt, f, t.name, chainPrefix+c.name)
			if err != nil {
				return nil, err
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

// remove assumes that all of ours is there, and looks only if it is not.
func (b iptablesBackend) remove(ctx context.Context, f Family, tables []table) error {
	whole := func(t table) (tableState, error) {
		s := tableState{map[string]bool{}, map[string][]string{}}
		for _, c := range t.chains {
			s.chains[chainPrefix+c.name] = true
			if c.hook != "" {
				s.hooks[c.hook] = []string{appendRule(f, c.hook, c.via, target(c.name))}
			}
		}
		return s, nil
	}
	doc, err := removal(tables, whole)
	if err != nil {
		return err
	}
	if b.restore(ctx, f, doc) == nil {
		return nil
	}
	doc, err = removal(tables, func(t table) (tableState, error) { return b.look(f, t) })
	if err != nil {
		return err
	}
	return b.restore(ctx, f, doc)
}

// removal renders what takes away every chain of ours and every jump to one, whatever is in them.
func removal(tables []table, state func(table) (tableState, error)) ([]byte, error) {
	var doc bytes.Buffer
	for _, t := range slices.Backward(tables) {
		have, err := state(t)
		if err != nil {
			return nil, err
		}
		fmt.Fprintf(&doc, "*%s\n", t.name)
		for _, rules := range have.hooks {
			for _, r := range rules {
				if strings.Contains(r, "-j "+chainPrefix) {
					fmt.Fprintf(&doc, "-D%s\n", strings.TrimPrefix(r, "-A"))
				}
			}
		}
		var ours []string
		for name, is := range have.chains {
			if is {
				ours = append(ours, name)
			}
		}
		slices.Sort(ours)
		for _, verb := range []string{"-F", "-X"} { // they refer to each other: empty all, then delete
			for _, name := range ours {
				fmt.Fprintf(&doc, "%s %s\n", verb, name)
			}
		}
		doc.WriteString("COMMIT\n")
	}
	return doc.Bytes(), nil
}

// diff names every rule that is missing, changed or not ours, in chain order.
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
