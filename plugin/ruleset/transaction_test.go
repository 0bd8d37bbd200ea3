package ruleset

import (
	"encoding/binary"
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
	fine := rule{match{}, targetReturn, "it is fine"}
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
			"a rule", []table{{family: inet, name: "wall", chains: chainOf(fine, astray)}},
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

// TestOneTransaction: the rules of a new pod come in one step, and whoever watches its netns has one change to read.
func TestOneTransaction(t *testing.T) {
	inNetns(t, func() error {
		s, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_NETFILTER)
		if err != nil {
			return err
		}
		defer unix.Close(s) //nolint:errcheck // nothing was written
		_ = unix.SetsockoptInt(s, unix.SOL_NETLINK, unix.NETLINK_NO_ENOBUFS, 1)
		err = unix.Bind(s, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: 1 << (unix.NFNLGRP_NFTABLES - 1)})
		if err != nil {
			return err
		}
		in, err := applyHere(t.Context(), Provisional("eth0"), BackendNFTables, nil)
		if err != nil {
			return err
		}
		if in.Backend != BackendNFTables || in.Wall != WallFull || !in.SYNGate || !in.IPv6 {
			t.Errorf("installed: %+v; want all of it, with nftables", in)
		}
		transactions := 0
		for {
			m := make([]byte, 1<<16)
			if _, _, err := unix.Recvfrom(s, m, unix.MSG_DONTWAIT); errors.Is(err, unix.EAGAIN) {
				break
			} else if err != nil {
				return err
			}
			if binary.NativeEndian.Uint16(m[4:]) == unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_NEWGEN {
				transactions++ // the kernel announces each generation of the rules
			}
		}
		if transactions != 1 {
			t.Errorf("the rules came in %d transactions, want one", transactions)
		}
		return nil
	})
}
