package netconf

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// TestPrintResultKeepsEveryByte: prevResult has fields that this version of the CNI library does not know.
func TestPrintResultKeepsEveryByte(t *testing.T) {
	t.Parallel()
	for version, prevResult := range map[string]string{
		"0.3.0": `{"cniVersion":"0.3.0","ips":[{"version":"4","address":"10.0.0.5/24","gateway":"10.0.0.1"}],"dns":{}}`,
		"0.3.1": `{"cniVersion":"0.3.1","ips":[{"version":"4","address":"10.0.0.5/24"}],"dns":{}}`,
		"0.4.0": `{"cniVersion":"0.4.0","ips":[{"version":"6","address":"fd00::5/64","x":1}],"dns":{}}`,
		"1.0.0": `{ "dns" : {},  "cniVersion" : "1.0.0","ips":[ {"address":"10.0.0.5/24","new-field":1e2} ], ` +
			`"also-new":{"b":1,"a":[2]} }`,
		"1.1.0": `{"cniVersion":"1.1.0",` +
			`"interfaces":[{"name":"eth0","mtu":1450,"sandbox":"/run/netns/x","strange":true}],"dns":{}}`,
	} {
		c := parse(t, version, prevResult)
		if got := printed(t, c); got != prevResult {
			t.Errorf("%s: got %s, want prevResult as it came in: %s", version, got, prevResult)
		}
		if _, err := c.Result(); err != nil {
			t.Errorf("%s: Result: %v", version, err)
		}
	}
}

func TestPrintResultConvertsOtherVersions(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct{ confVersion, prevVersion, prevResult, wantIPs string }{
		{
			"1.0.0", "1.1.0",
			`{"cniVersion":"1.1.0","interfaces":[{"name":"eth0","mtu":1450}],"ips":[{"address":"10.0.0.5/24"}]}`,
			`[{"address":"10.0.0.5/24"}]`,
		},
		{
			"0.3.1", "0.4.0",
			`{"cniVersion":"0.4.0","ips":[{"version":"4","address":"10.0.0.5/24"}]}`,
			`[{"address":"10.0.0.5/24","version":"4"}]`,
		},
		{
			"0.3.0", "0.3.1",
			`{"cniVersion":"0.3.1","ips":[{"version":"6","address":"fd00::5/64"}]}`,
			`[{"address":"fd00::5/64","version":"6"}]`,
		},
		{
			"0.3.1", "0.3.0",
			`{"cniVersion":"0.3.0","ips":[{"version":"4","address":"10.0.0.5/24"}]}`,
			`[{"address":"10.0.0.5/24","version":"4"}]`,
		},
		{
			"1.1.0", "1.0.0",
			`{"cniVersion":"1.0.0","ips":[{"address":"fd00::5/64"}]}`,
			`[{"address":"fd00::5/64"}]`,
		},
	} {
		c := parse(t, tc.confVersion, tc.prevResult)
		var got struct {
			CNIVersion string
			IPs        []map[string]any
		}
		if err := json.Unmarshal([]byte(printed(t, c)), &got); err != nil {
			t.Fatal(err)
		}
		ips, err := json.Marshal(got.IPs)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff([]string{tc.confVersion, tc.wantIPs}, []string{got.CNIVersion, string(ips)}); diff != "" {
			t.Errorf("%s to %s (-want +got):\n%s", tc.prevVersion, tc.confVersion, diff)
		}
	}
}

// TestPrevResultOfAnotherFormat: the result formats of 1.0.0 and 0.4.0 differ. No runtime mixes them.
func TestPrevResultOfAnotherFormat(t *testing.T) {
	t.Parallel()
	for conf, prev := range map[string]string{"0.4.0": "1.0.0", "1.0.0": "0.4.0"} {
		_, err := Parse(fmt.Appendf(nil, `{"cniVersion":%q,"prevResult":{"cniVersion":%q}}`, conf, prev))
		if err == nil || !strings.Contains(err.Error(), prev) {
			t.Errorf("prevResult %s in configuration %s: got %v, want an error that names %[1]s", prev, conf, err)
		}
	}
}

// TestPrevResultWithoutVersion: prevResult then has the version of the configuration.
func TestPrevResultWithoutVersion(t *testing.T) {
	t.Parallel()
	c := parse(t, "1.0.0", `{"ips":[{"address":"10.0.0.5/24"}]}`)
	r, err := c.Result()
	if err != nil || len(r.IPs) != 1 {
		t.Fatalf("Result: got %v, %v; want one address", r, err)
	}
	if got := printed(t, c); !strings.Contains(got, "10.0.0.5/24") {
		t.Errorf("got %s, want the address in it", got)
	}
}

func TestNoPrevResult(t *testing.T) {
	t.Parallel()
	for _, stdin := range []string{`{}`, `{"cniVersion":"1.0.0","prevResult":null}`} {
		c, err := Parse([]byte(stdin))
		if err != nil {
			t.Errorf("Parse(%s): %v", stdin, err)
			continue
		}
		const want = "no prevResult: sluice is a chained plugin"
		if _, err := c.Result(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %v, want %q", stdin, err, want)
		}
	}
}

func parse(t *testing.T, version, prevResult string) *Conf {
	t.Helper()
	stdin := fmt.Appendf(nil, `{"cniVersion":%q,"name":"pods","type":"sluice","prevResult":%s}`, version, prevResult)
	c, err := Parse(stdin)
	if err != nil {
		t.Fatalf("prevResult %s: %v", prevResult, err)
	}
	return c
}

func printed(t *testing.T, c *Conf) string {
	t.Helper()
	var out bytes.Buffer
	if err := c.PrintResult(&out); err != nil {
		t.Fatalf("PrintResult: %v", err)
	}
	return out.String()
}
