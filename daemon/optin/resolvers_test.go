package optin

import (
	"os"
	"path/filepath"
	"slices"
	"testing"
)

func TestResolvers(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name, file string
		want       []string
	}{
		{
			"as kubelet writes it", "search ci.svc.cluster.local\nnameserver 10.96.0.10\noptions ndots:5\n",
			[]string{"10.96.0.10"},
		},
		{
			"several, with comments", "# nameserver 192.0.2.9\n;nameserver 192.0.2.9\nnameserver\t192.0.2.1\n" +
				"nameserver   2001:db8::1 # the second",
			[]string{"192.0.2.1", "2001:db8::1"},
		},
		{
			"scoped and mapped", "nameserver fe80::1%eth0\nnameserver ::ffff:192.0.2.1\n",
			[]string{"fe80::1", "192.0.2.1"},
		},
		{"loopback, as systemd-resolved", "nameserver 127.0.0.53\nnameserver ::1\nnameserver 0.0.0.0\n", nil},
		{"no addresses", "nameserver\nnameserver dns.example\nnameservers 192.0.2.1\ndomain x\n", nil},
		{"empty", "", nil},
	} {
		path := filepath.Join(t.TempDir(), "resolv.conf")
		if err := os.WriteFile(path, []byte(tc.file), 0o600); err != nil {
			t.Fatal(err)
		}
		if got, err := Resolvers(path); err != nil || !slices.Equal(got, addresses(tc.want...)) {
			t.Errorf("%s: got %v, %v; want %v", tc.name, got, err, tc.want)
		}
	}
	if got, err := Resolvers(filepath.Join(t.TempDir(), "none")); err != nil || got != nil {
		t.Errorf("no file: got %v, %v; want no name servers", got, err)
	}
	if got, err := Resolvers(t.TempDir()); err == nil {
		t.Errorf("a directory: got %v, want an error", got)
	}
}
