package escape

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/google/nftables/userdata"
	"golang.org/x/sys/unix"
)

// mutants are all changes of one rule, or of two neighbours, as the kernel has them now.
func (l *lab) mutants() []mutant {
	l.t.Helper()
	var all []mutant
	err := l.pod.Do(func() error {
		conn, err := nftables.New()
		if err != nil {
			return err
		}
		chains, err := conn.ListChains()
		if err != nil {
			return err
		}
		for _, c := range chains {
			if !strings.HasPrefix(c.Table.Name, "sluice-") {
				continue // of iptables
			}
			rules, err := conn.GetRules(c.Table, c)
			if err != nil {
				return err
			}
			all = append(all, mutantsOf(rules)...)
		}
		return nil
	})
	if err != nil {
		l.t.Fatalf("listing rules: %v", err)
	}
	if l.flavour.Backend == "iptables" {
		for _, tool := range []string{l.flavour.Name, strings.Replace(l.flavour.Name, "ip", "ip6", 1)} {
			for _, table := range []string{"mangle", "filter", "nat"} {
				all = append(all, iptablesMutants(l, tool, table)...)
			}
		}
	}
	return all
}

func mutantsOf(rules []*nftables.Rule) []mutant {
	var all []mutant
	for i, r := range rules {
		where := fmt.Sprintf("%s %s %s", familyName(r.Table.Family), r.Table.Name, r.Chain.Name)
		all = append(all, mutant{fmt.Sprintf("%s %02d: without %q", where, i+1, why(r)), func(l *lab) error {
			return l.changeRules(func(now []rawRule) [][]byte {
				return [][]byte{now[find(now, r, i)].message(nftDelete, 0)}
			})
		}})
		if i+1 == len(rules) || verdict(r) == verdict(rules[i+1]) {
			continue // two rules with the same verdict may be in any order
		}
		swapped := fmt.Sprintf("%s %02d: %q after %q", where, i+1, why(r), why(rules[i+1]))
		all = append(all, mutant{swapped, func(l *lab) error {
			return l.changeRules(func(now []rawRule) [][]byte {
				first, second := now[find(now, r, i)], now[find(now, r, i)+1]
				if learns(r) { // the kernel does not take back what it says about such a rule
					return [][]byte{second.message(nftDelete, 0), second.message(nftInsert, first.handle)}
				}
				return [][]byte{first.message(nftDelete, 0), first.message(nftAdd, second.handle)}
			})
		}})
	}
	return all
}

// learns reports whether r adds to a set.
func learns(r *nftables.Rule) bool {
	return slices.ContainsFunc(r.Exprs, func(e expr.Any) bool { _, is := e.(*expr.Dynset); return is })
}

// find returns the index of the i-th rule of r's chain.
func find(now []rawRule, r *nftables.Rule, i int) int {
	first := slices.IndexFunc(now, func(n rawRule) bool {
		return n.family == byte(r.Table.Family) && n.table == r.Table.Name && n.chain == r.Chain.Name
	})
	return first + i
}

func why(r *nftables.Rule) string {
	comment, _ := userdata.GetString(r.UserData, userdata.TypeComment)
	return comment
}

// verdict is the effect of a rule on a packet.
func verdict(r *nftables.Rule) string {
	switch e := r.Exprs[len(r.Exprs)-1].(type) {
	case *expr.Verdict:
		return fmt.Sprint(e.Kind, e.Chain)
	default:
		return fmt.Sprintf("%T", e)
	}
}

func familyName(f nftables.TableFamily) string {
	return map[nftables.TableFamily]string{
		nftables.TableFamilyIPv4: "ip", nftables.TableFamilyIPv6: "ip6",
		nftables.TableFamilyINet: "inet", nftables.TableFamilyNetdev: "netdev",
	}[f]
}

// rawRule is a rule as the kernel describes it. The library would lose a part of it.
type rawRule struct {
	family       byte
	table, chain string
	handle       uint64
	attributes   []byte // all that make the rule
}

// Messages and attributes of nftables (linux/netfilter/nf_tables.h).
const (
	nftAdd, nftList, nftDelete                     = 6, 7, 8
	nftInsert                                      = 0 // stands for an add before another rule
	ruleTable, ruleChain, ruleHandle, rulePosition = 1, 2, 3, 6

	nfSubsystem, batchBegin, batchEnd = unix.NFNL_SUBSYS_NFTABLES, 0x10, 0x11
)

// changeRules sends messages that depend on the rules, as one transaction in the pod's netns.
func (l *lab) changeRules(messages func([]rawRule) [][]byte) error {
	return l.pod.Do(func() error {
		s, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_NETFILTER)
		if err != nil {
			return err
		}
		defer unix.Close(s) //nolint:errcheck // the answer has been read
		list := netlinkMessage(nfSubsystem<<8|nftList, unix.NLM_F_DUMP, unix.AF_UNSPEC, 0, nil)
		rules, err := exchange(s, list)
		if err != nil {
			return fmt.Errorf("listing rules: %w", err)
		}
		batch := netlinkMessage(batchBegin, 0, 0, nfSubsystem, nil)
		all := messages(rules)
		for i, m := range all {
			if i == len(all)-1 {
				m[6] |= unix.NLM_F_ACK
			}
			batch = append(batch, m...)
		}
		batch = append(batch, netlinkMessage(batchEnd, 0, 0, nfSubsystem, nil)...)
		_, err = exchange(s, batch)
		return err
	})
}

func netlinkMessage(kind uint16, flags uint16, family byte, resource uint16, attributes []byte) []byte {
	b := binary.NativeEndian.AppendUint32(nil, uint32(20+len(attributes)))
	b = binary.NativeEndian.AppendUint16(b, kind)
	b = binary.NativeEndian.AppendUint16(b, flags|unix.NLM_F_REQUEST)
	b = append(b, 0, 0, 0, 0, 0, 0, 0, 0, family, 0)
	return append(binary.BigEndian.AppendUint16(b, resource), attributes...)
}

// message deletes r, or adds a copy of it after the rule with the handle position, or before it.
func (r rawRule) message(kind uint16, position uint64) []byte {
	b := attribute(nil, ruleTable, append([]byte(r.table), 0))
	b = attribute(b, ruleChain, append([]byte(r.chain), 0))
	flags := uint16(0)
	if kind == nftDelete {
		b = attribute(b, ruleHandle, binary.BigEndian.AppendUint64(nil, r.handle))
	} else {
		b = append(b, r.attributes...)
		b = attribute(b, rulePosition, binary.BigEndian.AppendUint64(nil, position))
		flags = unix.NLM_F_CREATE
		if kind == nftAdd {
			flags |= unix.NLM_F_APPEND
		}
		kind = nftAdd
	}
	return netlinkMessage(nfSubsystem<<8|kind, flags, r.family, 0, b)
}

func attribute(b []byte, kind uint16, data []byte) []byte {
	b = binary.NativeEndian.AppendUint16(b, uint16(4+len(data)))
	b = binary.NativeEndian.AppendUint16(b, kind)
	return append(append(b, data...), make([]byte, (4-len(data)%4)%4)...)
}

// exchange sends messages, and reads the answer up to its end: rules, or an acknowledgement.
func exchange(s int, messages []byte) (rules []rawRule, err error) {
	if err := unix.Sendto(s, messages, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return nil, err
	}
	answer := make([]byte, 1<<18)
	for {
		n, _, err := unix.Recvfrom(s, answer, 0)
		if err != nil {
			return nil, err
		}
		for b := answer[:n]; len(b) >= 16; {
			size := int(binary.NativeEndian.Uint32(b))
			switch kind := binary.NativeEndian.Uint16(b[4:]); kind {
			case unix.NLMSG_DONE:
				return rules, nil
			case unix.NLMSG_ERROR:
				if code := int32(binary.NativeEndian.Uint32(b[16:])); code != 0 {
					return nil, unix.Errno(-code)
				}
				return rules, nil
			case nfSubsystem<<8 | nftAdd:
				rules = append(rules, parseRule(b[16], append([]byte{}, b[20:size]...)))
			default:
				return nil, errors.New("an answer of an unknown kind")
			}
			b = b[min((size+3)&^3, len(b)):]
		}
	}
}

func parseRule(family byte, b []byte) rawRule {
	r := rawRule{family: family}
	for len(b) >= 4 {
		size := int(binary.NativeEndian.Uint16(b))
		data := b[4:size]
		whole := b[:min((size+3)&^3, len(b))]
		switch kind := binary.NativeEndian.Uint16(b[2:]) & 0x3fff; kind {
		case ruleTable:
			r.table = strings.TrimRight(string(data), "\x00")
		case ruleChain:
			r.chain = strings.TrimRight(string(data), "\x00")
		case ruleHandle:
			r.handle = binary.BigEndian.Uint64(data)
		case rulePosition: // of the rule before it
		default:
			r.attributes = append(r.attributes, whole...)
		}
		b = b[len(whole):]
	}
	return r
}

// iptablesMutants are those of one table of iptables.
func iptablesMutants(l *lab, tool, table string) []mutant {
	l.t.Helper()
	numbers := map[string]int{}
	var all []mutant
	lines := strings.Split(strings.TrimSpace(l.pod.Exec(tool, "-t", table, "-S")), "\n")
	for i, line := range lines {
		rule := strings.Fields(line)
		if rule[0] != "-A" {
			continue
		}
		chain := rule[1]
		numbers[chain]++
		if !strings.Contains(line, "SLUICE_") {
			continue
		}
		number := fmt.Sprint(numbers[chain])
		where := fmt.Sprintf("%s %s %s %02s", tool, table, chain, number)
		remove := []string{"-t", table, "-D", chain, number}
		all = append(all, mutant{fmt.Sprintf("%s: without %q", where, line), func(l *lab) error {
			_, err := l.pod.TryExec(tool, remove...)
			return err
		}})
		if i+1 == len(lines) || !strings.HasPrefix(lines[i+1], "-A "+chain+" ") || target(line) == target(lines[i+1]) {
			continue
		}
		again := append([]string{"-t", table, "-I", chain, fmt.Sprint(numbers[chain] + 1)}, rule[2:]...)
		all = append(all, mutant{fmt.Sprintf("%s: %q after %q", where, line, lines[i+1]), func(l *lab) error {
			_, err := l.pod.TryExec(tool, remove...)
			_, ierr := l.pod.TryExec(tool, again...)
			return errors.Join(err, ierr)
		}})
	}
	return all
}

// target is the effect of a rule of iptables on a packet.
func target(line string) string {
	_, t, _ := strings.Cut(line, " -j ")
	return t
}
