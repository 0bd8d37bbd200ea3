package ruleset

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
)

// Leftover reports whether any rule of sluice is in the netns at path, whichever backend installed it. It needs a
// program only if the tables of iptables-legacy are in use there.
func Leftover(ctx context.Context, netns string) (found bool, err error) {
	err = within(netns, func() error {
		nft, nftErr := findNFT()
		_, legacy, legacyErr := findLegacy(ctx)
		found = nft.any() || len(legacy) > 0
		return errors.Join(nftErr, legacyErr)
	})
	return found, err
}

// Purge deletes every rule of sluice from the netns at path, known by the names of its tables and chains, whichever
// backends installed them and however much of it. It needs a program only for the tables of iptables-legacy. If nothing
// is left it does nothing.
func Purge(ctx context.Context, netns string) error {
	return within(netns, func() error {
		nft, err := findNFT()
		if err == nil {
			err = nft.delete()
		}
		tool, families, legacyErr := findLegacy(ctx)
		if len(families) > 0 {
			legacyErr = errors.Join(legacyErr, removeWith(ctx, tool, families, false, nil))
		}
		return errors.Join(err, legacyErr)
	})
}

// nftTraces are the parts of sluice in nf_tables, in the netns of the calling thread: those of the backend nftables,
// and those of iptables-nft, which keeps its chains and rules there too.
type nftTraces struct {
	tables []*nftables.Table // of the backend nftables
	chains []*nftables.Chain // in tables that are not sluice's
	jumps  []*nftables.Rule  // to these chains, from chains that are not sluice's
}

func (n nftTraces) any() bool { return len(n.tables)+len(n.chains) > 0 }

func findNFT() (nftTraces, error) {
	conn, err := nftables.New()
	if err != nil {
		return nftTraces{}, fmt.Errorf("opening nftables: %w", err)
	}
	var found nftTraces
	tables, err := conn.ListTables()
	if lacksNFT(err) {
		return nftTraces{}, nil // and so there are no rules
	}
	if err != nil {
		return nftTraces{}, fmt.Errorf("listing tables of nftables: %w", err)
	}
	for _, t := range tables {
		if isOurs(t) {
			found.tables = append(found.tables, t)
		}
	}
	chains, err := conn.ListChains()
	if err != nil {
		return nftTraces{}, fmt.Errorf("listing chains of nftables: %w", err)
	}
	for _, c := range chains {
		if strings.HasPrefix(c.Name, chainPrefix) && !isOurs(c.Table) {
			found.chains = append(found.chains, c)
		}
	}
	for _, c := range chains {
		if strings.HasPrefix(c.Name, chainPrefix) || !found.inTable(c.Table) {
			continue
		}
		rules, err := conn.GetRules(c.Table, c)
		if err != nil {
			return nftTraces{}, fmt.Errorf("listing chain %s of table %s: %w", c.Name, c.Table.Name, err)
		}
		for _, r := range rules {
			if leadsToUs(r) {
				found.jumps = append(found.jumps, r)
			}
		}
	}
	return found, nil
}

func isOurs(t *nftables.Table) bool { return strings.HasPrefix(t.Name, nftTablePrefix) }

// inTable reports whether chains were found in t.
func (n nftTraces) inTable(t *nftables.Table) bool {
	return slices.ContainsFunc(n.chains, func(c *nftables.Chain) bool {
		return c.Table.Name == t.Name && c.Table.Family == t.Family
	})
}

func leadsToUs(r *nftables.Rule) bool {
	return slices.ContainsFunc(r.Exprs, func(e expr.Any) bool {
		v, ok := e.(*expr.Verdict)
		return ok && strings.HasPrefix(v.Chain, chainPrefix)
	})
}

// delete deletes all of it in one transaction.
func (n nftTraces) delete() error {
	if !n.any() {
		return nil
	}
	conn, err := nftables.New()
	if err != nil {
		return fmt.Errorf("opening nftables: %w", err)
	}
	for _, t := range n.tables {
		conn.DelTable(t)
	}
	for _, r := range n.jumps {
		if err := conn.DelRule(r); err != nil {
			return fmt.Errorf("deleting a jump from chain %s of table %s: %w", r.Chain.Name, r.Table.Name, err)
		}
	}
	for _, c := range n.chains { // the chains refer to each other: flush all, then delete
		conn.FlushChain(c)
	}
	for _, c := range n.chains {
		conn.DelChain(c)
	}
	if err := conn.Flush(); err != nil {
		return fmt.Errorf("deleting chains and tables of nftables: %w", err)
	}
	return nil
}

// legacyTables are the files that list the tables that iptables-legacy uses in the netns of the thread that reads them.
// To list the rules of a table would add it, and pods that never had one would have it then.
var legacyTables = map[Family]string{
	IPv4: "/proc/thread-self/net/ip_tables_names", IPv6: "/proc/thread-self/net/ip6_tables_names",
}

// findLegacy returns the families in which iptables-legacy has chains of sluice, in the netns of the calling thread,
// and the tool that removes them.
func findLegacy(ctx context.Context) (tool iptablesBackend, families []Family, err error) {
	for _, f := range []Family{IPv4, IPv6} {
		names, err := os.ReadFile(legacyTables[f])
		if errors.Is(err, fs.ErrNotExist) || err == nil && len(names) == 0 {
			continue
		}
		if err != nil {
			return "", nil, fmt.Errorf("listing the tables of iptables-legacy: %w", err)
		}
		if tool = legacyTool(); tool == "" {
			return "", nil, errors.New("the netns has tables of iptables-legacy, and the tool is not in PATH")
		}
		has, err := hasLegacyChain(ctx, tool, f)
		if err != nil {
			return "", nil, err
		}
		if has {
			families = append(families, f)
		}
	}
	return tool, families, nil
}

// legacyTool returns the flavour that reaches the legacy tables, or "". Where there is only one flavour its name does
// not tell, and the chains of iptables-nft are found without a tool.
func legacyTool() iptablesBackend {
	for _, b := range findIPTables() {
		if b.name() != "iptables-nft" {
			return iptablesBackend(b.name())
		}
	}
	return ""
}

func hasLegacyChain(ctx context.Context, b iptablesBackend, f Family) (bool, error) {
	present, err := b.save(ctx, f)
	if err != nil {
		return false, err
	}
	for _, chains := range present {
		for name := range chains {
			if strings.HasPrefix(name, chainPrefix) {
				return true, nil
			}
		}
	}
	return false, nil
}
