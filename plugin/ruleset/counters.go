package ruleset

import (
	"bytes"
	"errors"
	"fmt"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"golang.org/x/sys/unix"
)

// Counters reads how many packets the wall of one netns has stopped, from any thread.
type Counters struct{ conn *nftables.Conn }

// OpenCounters opens the counters of the netns of the calling thread.
func OpenCounters() (*Counters, error) {
	conn, err := nftables.New(nftables.AsLasting())
	if err != nil {
		return nil, fmt.Errorf("opening nftables: %w", err)
	}
	return &Counters{conn}, nil
}

// Close closes the connection to the kernel.
func (c *Counters) Close() error { return c.conn.CloseLasting() }

// Stopped returns the number of packets that were stopped since the wall was installed. A count may also begin anew
// when a part of the rules is restored. A pod that has the capability to change its rules may add counters of its own.
func (c *Counters) Stopped() (map[Cause]uint64, error) {
	counts := map[Cause]uint64{}
	for _, name := range []string{"wall", "refuse"} {
		all, err := c.conn.GetObjects(&nftables.Table{Name: nftTablePrefix + name}) // of every family
		if err != nil {
			return nil, fmt.Errorf("reading the counters of the tables %s: %w", nftTablePrefix+name, err)
		}
		for _, o := range all {
			if counter, ok := o.(*nftables.CounterObj); ok && slices.Contains(Causes, Cause(counter.Name)) {
				counts[Cause(counter.Name)] += counter.Packets
			}
		}
	}
	return counts, nil
}

// PassedExpired returns the number of packets that have left the netns at path because the ruleset had expired.
func (i Installed) PassedExpired(path string) (packets uint64, err error) {
	if i.Ruleset.ExpiresAfter == 0 {
		return 0, nil
	}
	err = within(path, func() error {
		conn, err := nftables.New()
		if err != nil {
			return fmt.Errorf("opening nftables: %w", err)
		}
		all, err := conn.GetObjects(&nftables.Table{Name: nftTablePrefix + "wall"}) // of every family
		if err != nil {
			return fmt.Errorf("reading the counters of the tables %swall: %w", nftTablePrefix, err)
		}
		for _, o := range all {
			if counter, ok := o.(*nftables.CounterObj); ok && counter.Name == string(causeExpired) {
				packets += counter.Packets
			}
		}
		return nil
	})
	return packets, err
}

// KnowBridges tells the wall in the netns at path of bridges, by their interface indices: packets to them stay in the
// pod. It learns of most bridges by itself, from packets that come through them or go to them.
func (i Installed) KnowBridges(path string, indices []int) error {
	if i.Wall == WallNone || len(indices) == 0 {
		return nil
	}
	return within(path, func() error {
		conn, err := nftables.New()
		if err != nil {
			return fmt.Errorf("opening nftables: %w", err)
		}
		for _, t := range i.wall() {
			if !knowsBridges(t) {
				continue
			}
			if err := addBridges(conn, t, indices); err != nil {
				return fmt.Errorf("the set of bridges: %w", err)
			}
		}
		return conn.Flush()
	})
}

// addBridges adds those that the set of t lacks, since each addition is an event for those who watch the rules.
func addBridges(conn *nftables.Conn, t table, indices []int) error {
	set := &nftables.Set{Table: nftTable(t), Name: knownBridges, KeyType: nftables.TypeIFIndex}
	known, err := conn.GetSetElements(set)
	if errors.Is(err, unix.ENOENT) {
		return nil // the wall will be restored
	}
	if err != nil {
		return err
	}
	var missing []nftables.SetElement
	for _, index := range indices {
		key := binaryutil.NativeEndian.PutUint32(uint32(index))
		if !slices.ContainsFunc(known, func(e nftables.SetElement) bool { return bytes.Equal(e.Key, key) }) {
			missing = append(missing, nftables.SetElement{Key: key})
		}
	}
	if len(missing) == 0 {
		return nil
	}
	return conn.SetAddElements(set, missing)
}
