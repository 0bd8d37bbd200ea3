package optin

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"strings"
)

// Resolvers returns the name servers in a file such as /etc/resolv.conf, without loopback addresses: those are another
// server in each netns. A file that does not exist has none.
func Resolvers(path string) ([]netip.Addr, error) {
	data, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("reading name servers: %w", err)
	}
	var servers []string
	for line := range strings.Lines(string(data)) {
		if words := strings.Fields(line); len(words) > 1 && words[0] == "nameserver" {
			servers = append(servers, words[1])
		}
	}
	return ParseResolvers(servers), nil
}

// ParseResolvers returns those of the addresses that can be a pod's name servers.
func ParseResolvers(servers []string) []netip.Addr {
	var all []netip.Addr
	for _, s := range servers {
		a, err := netip.ParseAddr(s)
		if a = a.WithZone("").Unmap(); err == nil && !a.IsLoopback() && !a.IsUnspecified() {
			all = append(all, a)
		}
	}
	return all
}
