package ruleset

import (
	"fmt"

	"github.com/google/nftables"
)

// Before names the nat chains of other programs that see connections before sluice's do, in the netns at path in which
// i is installed. The wall stops connections that such a chain leads elsewhere, but they fail then. Only chains of
// nftables can come before: those of iptables have the priority of sluice's own.
func (i Installed) Before(path string) (names []string, err error) {
	if i.Wall == WallNone {
		return nil, nil // this kernel has no nftables
	}
	err = within(path, func() error {
		conn, err := nftables.New()
		if err != nil {
			return fmt.Errorf("opening nftables: %w", err)
		}
		chains, err := conn.ListChains()
		if err != nil {
			return fmt.Errorf("listing chains of nftables: %w", err)
		}
		for _, c := range chains {
			if c.Type == nftables.ChainTypeNAT && c.Hooknum != nil && c.Priority != nil &&
				*c.Priority < *nftables.ChainPriorityNATDest && !isOurs(c.Table) {
				names = append(names, fmt.Sprintf(
					"the nat chain %s of table %s of another program comes before sluice's", c.Name, c.Table.Name))
			}
		}
		return nil
	})
	return names, err
}
