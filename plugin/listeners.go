package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/containernetworking/plugins/pkg/ns"

	"github.com/sluice-cni/sluice/plugin/attach"
)

// checkListeners names the capture ports on which no socket listens, or one of a process in the pod: those of sluiced,
// and of the proxies that have them from it, belong to processes outside.
func checkListeners(netns string, r attach.Record) (drift []string, err error) {
	at, err := listeners(netns)
	if err != nil {
		return nil, err
	}
	inside, err := socketsInside(r.NetnsID)
	if err != nil {
		return nil, err
	}
	ports := r.Installed.Ruleset.CapturePorts()
	wanted := []listener{{"tcp", ports.Outbound}}
	if r.Installed.IPv6 {
		wanted = append(wanted, listener{"tcp6", ports.Outbound})
	}
	if len(r.Installed.Ruleset.InboundPorts) > 0 {
		for _, ip := range r.IPs {
			family := "tcp"
			if ip.Is6() {
				family = "tcp6"
			}
			wanted = append(wanted, listener{family, ports.Inbound})
		}
	}
	for _, l := range wanted {
		inodes := at[l]
		switch {
		case len(inodes) == 0:
			drift = append(drift, fmt.Sprintf("nothing listens on %s port %d: is sluiced running?", l.family, l.port))
		case slices.ContainsFunc(inodes, func(inode string) bool { return inside[inode] }):
			drift = append(drift, fmt.Sprintf("a process in the pod listens on %s port %d, which is sluice's",
				l.family, l.port))
		}
	}
	return drift, nil
}

// listener is a port on which a socket of a family, tcp or tcp6, listens.
type listener struct {
	family string
	port   uint16
}

// listeners returns the inodes of the listening sockets in the netns at path.
func listeners(path string) (map[listener][]string, error) {
	found := map[listener][]string{}
	err := ns.WithNetNSPath(path, func(ns.NetNS) error {
		for _, family := range []string{"tcp", "tcp6"} {
			table, err := os.ReadFile("/proc/thread-self/net/" + family)
			if errors.Is(err, os.ErrNotExist) {
				continue // this kernel runs without IPv6
			}
			if err != nil {
				return err
			}
			for port, inodes := range parseListeners(string(table)) {
				found[listener{family, port}] = inodes
			}
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("reading the sockets of netns %s: %w", path, err)
	}
	return found, nil
}

// parseListeners reads a table of sockets. Its columns are sl, local_address, rem_address, st, tx_queue:rx_queue,
// tr:tm->when, retrnsmt, uid, timeout, inode, … (proc_pid_net(5)).
func parseListeners(table string) map[uint16][]string {
	const stateListen = "0A"
	found := map[uint16][]string{}
	for line := range strings.Lines(table) {
		columns := strings.Fields(line)
		if len(columns) < 10 || columns[3] != stateListen {
			continue
		}
		_, hex, _ := strings.Cut(columns[1], ":")
		if port, err := strconv.ParseUint(hex, 16, 16); err == nil {
			found[uint16(port)] = append(found[uint16(port)], columns[9])
		}
	}
	return found
}

// socketsInside returns the inodes of the sockets of every process whose netns is that of a pod.
func socketsInside(netns attach.NetnsID) (map[string]bool, error) {
	processes, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		return nil, err
	}
	inodes := map[string]bool{}
	for _, p := range processes {
		if !isInside(p, netns) {
			continue
		}
		files, _ := filepath.Glob(filepath.Join(p, "fd/*"))
		for _, f := range files {
			target, err := os.Readlink(f)
			if inode, ok := strings.CutPrefix(target, "socket:["); err == nil && ok {
				inodes[strings.TrimSuffix(inode, "]")] = true
			}
		}
	}
	return inodes, nil
}

// isInside reports whether every thread of a process is in a netns. One thread of sluiced, even its first, may be there
// for a moment.
func isInside(process string, netns attach.NetnsID) bool {
	threads, err := filepath.Glob(filepath.Join(process, "task/[0-9]*"))
	if err != nil || len(threads) == 0 {
		return false // ended
	}
	return !slices.ContainsFunc(threads, func(thread string) bool {
		id, err := attach.StatNetns(filepath.Join(thread, "ns/net"))
		return err != nil || !id.SameFile(netns)
	})
}
