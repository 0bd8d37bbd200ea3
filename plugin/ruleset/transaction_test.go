package ruleset

import (
	"errors"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// inNetns runs do in a network namespace that lasts no longer.
func inNetns(t *testing.T, do func() error) {
	t.Helper()
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // for ever: the thread ends with the goroutine
		err := unix.Unshare(unix.CLONE_NEWNET)
		if err == nil {
			err = do()
		}
		done <- err
	}()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// TestErrorNamesTheObject: the kernel refuses a transaction as a whole, and the error names the first cause.
func TestErrorNamesTheObject(t *testing.T) {
	chainOf := func(rules ...rule) []chain { return []chain{{name: "TEST", rules: rules}} }
	astray := rule{match{proto: "tcp"}, jump("NOWHERE"), "it leads nowhere"}
	long := chain{name: strings.Repeat("LONG", 80)} // NFT_NAME_MAXLEN is 256
	counted := table{family: inet, name: "wall", chains: chainOf()}
	for _, tc := range []struct {
		name  string
		fresh []table
		want  string
		errno unix.Errno
	}{
		{
			"a rule", []table{{family: inet, name: "wall", chains: chainOf(rule{match{}, targetReturn, "fine"}, astray)}},
			"table sluice-wall: rule in chain SLUICE_TEST (it leads nowhere)", unix.ENOENT,
		},
		{
			"a chain", []table{{family: inet, name: "wall", chains: []chain{long}}},
			"table sluice-wall: chain SLUICE_LONG", unix.ERANGE,
		},
		{"a table", []table{counted, counted}, "table sluice-wall: ", unix.EEXIST},
	} {
		t.Run(tc.name, func(t *testing.T) {
			inNetns(t, func() error {
				err := replaceTables(nil, tc.fresh)
				if !errors.Is(err, tc.errno) || !strings.Contains(err.Error(), tc.want) {
					t.Errorf("got %v, want %q: %v", err, tc.want, tc.errno)
				}
				found, err := existing(tc.fresh)
				if len(found) > 0 {
					t.Errorf("the table %s stayed", found[0].Name)
				}
				return err
			})
		})
	}
}
