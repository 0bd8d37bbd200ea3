package ruleset

import (
	"encoding/hex"
	"fmt"
	"io"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/google/nftables/userdata"
)

// dumpTable writes a table as the nftables backend renders it: for each rule its reason, then one line for each
// expression.
func dumpTable(w io.Writer, t table) {
	nt := nftTable(t)
	families := map[Family]string{IPv4: "ip", IPv6: "ip6", inet: "inet", link: "netdev"}
	fmt.Fprintf(w, "table %s %s\n", families[t.family], nt.Name)
	if t.lasts > 0 {
		set, elements := nftLasting(nt, t.lasts)
		fmt.Fprintf(w, "  set %s\n    %x for %s\n", set.Name, elements[0].Key, elements[0].Timeout.Round(time.Second))
	}
	for _, cause := range causesOf(t.chains) {
		fmt.Fprintf(w, "  counter %s\n", cause)
	}
	for _, c := range nftChains(t) {
		fmt.Fprintf(w, "  chain %s", c.name)
		if c.hook != "" {
			h := nftHooks[t.name][c.hook]
			fmt.Fprintf(w, ": %s hook %d priority %d", h.kind, *h.hook, *h.priority)
		}
		fmt.Fprintln(w)
		for _, r := range c.rules {
			dumpRule(w, nftRule(nt, t.family, c.name, r))
		}
	}
}

func dumpRule(w io.Writer, r *nftables.Rule) {
	comment, _ := userdata.GetString(r.UserData, userdata.TypeComment)
	fmt.Fprintf(w, "    # %s\n", comment)
	for _, e := range r.Exprs {
		fmt.Fprintf(w, "    %s\n", describe(e))
	}
}

// describe writes an expression on one line, as `nft --debug=netlink` does if it has words for it.
func describe(e expr.Any) string {
	switch e := e.(type) {
	case *expr.Meta:
		keys := map[expr.MetaKey]string{
			expr.MetaKeyIIF: "iif", expr.MetaKeyOIF: "oif",
			expr.MetaKeyIIFNAME: "iifname", expr.MetaKeyOIFNAME: "oifname",
			expr.MetaKeyNFPROTO: "nfproto",
			expr.MetaKeyL4PROTO: "l4proto", expr.MetaKeyMARK: "mark", expr.MetaKeyRTCLASSID: "rtclassid",
			metaKeyIIFKIND: "iifkind", metaKeyOIFKIND: "oifkind",
		}
		return transfer("meta", keys[e.Key], e.SourceRegister, e.Register)
	case *expr.Payload:
		bases := map[expr.PayloadBase]string{
			expr.PayloadBaseLLHeader: "link", expr.PayloadBaseNetworkHeader: "network",
			expr.PayloadBaseTransportHeader: "transport",
		}
		return fmt.Sprintf("payload load %d bytes at %s + %d => reg %d", e.Len, bases[e.Base], e.Offset, e.DestRegister)
	case *expr.Bitwise:
		return fmt.Sprintf("bitwise reg %d = (reg %d & %x) ^ %x", e.DestRegister, e.SourceRegister, e.Mask, e.Xor)
	case *expr.Cmp:
		return fmt.Sprintf("cmp %s reg %d %s", compare(e.Op), e.Register, data(e.Data))
	case *expr.Range:
		return fmt.Sprintf("range %s reg %d %x to %x", compare(e.Op), e.Register, e.FromData, e.ToData)
	case *expr.Ct:
		keys := map[expr.CtKey]string{
			expr.CtKeySTATE: "state", expr.CtKeySTATUS: "status",
			expr.CtKeyMARK: "mark", expr.CtKeyDIRECTION: "direction",
		}
		return transfer("ct", keys[e.Key], e.SourceRegister, e.Register)
	case *expr.Fib:
		return fmt.Sprintf("fib daddr=%t mark=%t type=%t oif=%t => reg %d",
			e.FlagDADDR, e.FlagMARK, e.ResultADDRTYPE, e.ResultOIF, e.Register)
	case *expr.Lookup:
		not := map[bool]string{true: "not "}[e.Invert]
		return fmt.Sprintf("lookup reg %d %sin %s", e.SourceRegister, not, e.SetName)
	case *expr.Dynset:
		return fmt.Sprintf("add reg %d to %s", e.SrcRegKey, e.SetName)
	case *expr.Objref:
		return "count " + e.Name
	case *expr.Exthdr:
		return fmt.Sprintf("exthdr load presence of %d => reg %d", e.Type, e.DestRegister)
	case *expr.NAT:
		return fmt.Sprintf("dnat address reg %d port reg %d", e.RegAddrMin, e.RegProtoMin)
	case *expr.Socket:
		keys := map[expr.SocketKey]string{expr.SocketKeyTransparent: "transparent"}
		return fmt.Sprintf("socket load %s => reg %d", keys[e.Key], e.Register)
	case *expr.Immediate:
		return fmt.Sprintf("immediate reg %d %x", e.Register, e.Data)
	case *expr.Redir:
		return fmt.Sprintf("redir port reg %d to reg %d, flags %#x", e.RegisterProtoMin, e.RegisterProtoMax, e.Flags)
	case *expr.Reject:
		return fmt.Sprintf("reject type %d code %d", e.Type, e.Code)
	case *expr.Verdict:
		kinds := map[expr.VerdictKind]string{
			expr.VerdictReturn: "return", expr.VerdictAccept: "accept", expr.VerdictDrop: "drop",
			expr.VerdictJump: "jump", expr.VerdictGoto: "goto",
		}
		return strings.TrimSpace(kinds[e.Kind] + " " + e.Chain)
	}
	return fmt.Sprintf("%#v", e)
}

func transfer(kind, key string, set bool, register uint32) string {
	if set {
		return fmt.Sprintf("%s set %s = reg %d", kind, key, register)
	}
	return fmt.Sprintf("%s load %s => reg %d", kind, key, register)
}

func compare(op expr.CmpOp) string {
	return map[expr.CmpOp]string{
		expr.CmpOpEq: "==", expr.CmpOpNeq: "!=", expr.CmpOpLte: "<=", expr.CmpOpGte: ">=",
	}[op]
}

// data writes the name of an interface, or else hexadecimal digits.
func data(b []byte) string {
	if name := strings.TrimRight(string(b), "\x00"); len(b) == 16 && ValidateInterface(name) == nil {
		return strconv.Quote(name)
	}
	return hex.EncodeToString(b)
}

// TestDumpKnowsEveryExpression keeps the golden files readable: they contain no Go syntax.
func TestDumpKnowsEveryExpression(t *testing.T) {
	t.Parallel()
	for _, tc := range goldenCases {
		var dump strings.Builder
		for _, f := range []Family{IPv4, IPv6} {
			for _, tb := range tc.installed().Ruleset.tables(f, tc.installed().facts()) {
				dumpTable(&dump, tb)
			}
		}
		for _, tb := range tc.installed().wall() {
			dumpTable(&dump, tb)
		}
		if strings.Contains(dump.String(), "&expr.") {
			t.Errorf("%s: describe lacks an expression:\n%s", tc.name, dump.String())
		}
	}
}
