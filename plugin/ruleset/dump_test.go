package ruleset

import (
	"encoding/hex"
	"fmt"
	"io"
	"strconv"
	"strings"
	"testing"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/google/nftables/userdata"
)

// dumpTable writes a table as the nftables backend renders it: for each rule its reason, then one line for each
// expression.
func dumpTable(w io.Writer, f Family, t table) {
	nt := &nftables.Table{Family: nftFamily(f), Name: nftTablePrefix + t.name}
	fmt.Fprintf(w, "table %s %s\n", map[Family]string{IPv4: "ip", IPv6: "ip6"}[f], nt.Name)
	for _, c := range t.chains {
		if c.hook != "" {
			h := nftHooks[t.name][c.hook]
			fmt.Fprintf(w, "  chain %s: %s hook %d priority %d\n", c.hook, h.kind, *h.hook, *h.priority)
			dumpRule(w, nftRule(f, nt, c.hook, rule{c.via, target(c.name), c.why}))
		}
		fmt.Fprintf(w, "  chain %s\n", chainPrefix+c.name)
		for _, r := range c.rules {
			dumpRule(w, nftRule(f, nt, chainPrefix+c.name, r))
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
			expr.MetaKeyIIFNAME: "iifname", expr.MetaKeyOIFNAME: "oifname", expr.MetaKeyL4PROTO: "l4proto",
		}
		return fmt.Sprintf("meta load %s => reg %d", keys[e.Key], e.Register)
	case *expr.Payload:
		bases := map[expr.PayloadBase]string{
			expr.PayloadBaseNetworkHeader: "network", expr.PayloadBaseTransportHeader: "transport",
		}
		return fmt.Sprintf("payload load %d bytes at %s + %d => reg %d", e.Len, bases[e.Base], e.Offset, e.DestRegister)
	case *expr.Bitwise:
		return fmt.Sprintf("bitwise reg %d = (reg %d & %x) ^ %x", e.DestRegister, e.SourceRegister, e.Mask, e.Xor)
	case *expr.Cmp:
		return fmt.Sprintf("cmp %s reg %d %s", compare(e.Op), e.Register, data(e.Data))
	case *expr.Range:
		return fmt.Sprintf("range %s reg %d %x to %x", compare(e.Op), e.Register, e.FromData, e.ToData)
	case *expr.Ct:
		keys := map[expr.CtKey]string{expr.CtKeySTATE: "state", expr.CtKeySTATUS: "status"}
		return fmt.Sprintf("ct load %s => reg %d", keys[e.Key], e.Register)
	case *expr.Fib:
		return fmt.Sprintf("fib daddr=%t type=%t => reg %d", e.FlagDADDR, e.ResultADDRTYPE, e.Register)
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
			expr.VerdictReturn: "return", expr.VerdictDrop: "drop", expr.VerdictJump: "jump",
		}
		return strings.TrimSpace(kinds[e.Kind] + " " + e.Chain)
	}
	return fmt.Sprintf("%#v", e)
}

func compare(op expr.CmpOp) string {
	return map[expr.CmpOp]string{expr.CmpOpEq: "==", expr.CmpOpNeq: "!=", expr.CmpOpLte: "<="}[op]
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
		r := Provisional("eth0")
		tc.change(&r)
		var dump strings.Builder
		for _, f := range []Family{IPv4, IPv6} {
			for _, tb := range r.tables(f, true) {
				dumpTable(&dump, f, tb)
			}
		}
		if strings.Contains(dump.String(), "&expr.") {
			t.Errorf("%s: describe lacks an expression:\n%s", tc.name, dump.String())
		}
	}
}
