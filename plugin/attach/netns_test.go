package attach_test

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/sluice-cni/sluice/integration/testbed"
	"github.com/sluice-cni/sluice/plugin/attach"
)

func identify(t *testing.T, path string) attach.NetnsID {
	t.Helper()
	id, err := attach.IdentifyNetns(path)
	if err != nil {
		t.Fatalf("IdentifyNetns: %v", err)
	}
	return id
}

func TestIdentifyNetnsTellsNetnsApart(t *testing.T) {
	t.Parallel()
	a, b := testbed.NewHost(t, "a"), testbed.NewHost(t, "b")
	idA, idB := identify(t, a.Path()), identify(t, b.Path())
	if idA == idB || idA.SameFile(idB) {
		t.Errorf("two netns: got %+v and %+v, want two identities", idA, idB)
	}
	if again := identify(t, a.Path()); again != idA {
		t.Errorf("one netns: got %+v and %+v, want one identity", idA, again)
	}
	if idA.Cookie == 0 {
		t.Errorf("got %+v, want a cookie; it takes Linux 5.14", idA)
	}
	stat, err := attach.StatNetns(a.Path())
	if err != nil || !stat.SameFile(idA) || stat.Cookie != 0 {
		t.Errorf("StatNetns: got %+v, %v; want %+v without the cookie", stat, err, idA)
	}
}

// TestIdentifyNetnsRecreatedAtTheSamePath recreates the netns several times, as only some of the new netns get a used
// inode: the kernel gives it away once it has cleaned up the netns that had it.
func TestIdentifyNetnsRecreatedAtTheSamePath(t *testing.T) {
	t.Parallel()
	h := testbed.NewHost(t, "again")
	ids, inodes := map[attach.NetnsID]bool{}, map[uint64]bool{}
	const times = 40
	for range times {
		h.Delete()
		testbed.Run(t, "ip", "netns", "add", h.Name)
		id := identify(t, h.Path())
		if ids[id] {
			t.Fatalf("deleted and made again: got %+v twice", id)
		}
		ids[id], inodes[id.Ino] = true, true
	}
	t.Logf("%d netns had %d inodes", times, len(inodes))
}

// TestCheckNotNode in a netns that stands for the node's.
func TestCheckNotNode(t *testing.T) {
	t.Parallel()
	node, pod := testbed.NewHost(t, "node"), testbed.NewHost(t, "pod")
	mount := filepath.Join(t.TempDir(), "netns")
	if err := os.WriteFile(mount, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	testbed.Run(t, "mount", "--bind", node.Path(), mount)
	t.Cleanup(func() { testbed.Run(t, "umount", mount) })
	own := identify(t, node.Path())
	type netns struct {
		id   attach.NetnsID
		node bool
	}
	cases := map[string]netns{
		"its own netns": {own, true}, "at another path": {identify(t, mount), true},
		"without the cookie": {attach.NetnsID{Dev: own.Dev, Ino: own.Ino}, true},
		"that of a pod":      {identify(t, pod.Path()), false},
	}
	if init, err := attach.IdentifyNetns("/proc/1/ns/net"); err == nil { // it takes privileges over process 1
		cases["that of process 1"] = netns{init, true}
	}
	for name, tc := range cases {
		err := node.Do(tc.id.CheckNotNode)
		if got := errors.Is(err, attach.ErrNodeNetns); got != tc.node || err != nil && !got {
			t.Errorf("%s: got %v, want ErrNodeNetns %t", name, err, tc.node)
		}
	}
	if err := pod.Do(own.CheckNotNode); err != nil {
		t.Errorf("from another netns: got %v, want no error", err)
	}
}

func TestIdentifyNetnsGone(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	file := filepath.Join(dir, "plain")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for name, path := range map[string]string{
		"no such file": filepath.Join(dir, "none"), "a plain file": file, "a directory": dir,
		"a process that ended": "/proc/4194305/ns/net", // above the highest PID
	} {
		_, err := attach.IdentifyNetns(path)
		if !errors.Is(err, attach.ErrNetnsGone) {
			t.Errorf("%s: got %v, want ErrNetnsGone", name, err)
		}
		checkError(t, name, err, path)
	}
	h := testbed.NewHost(t, "deleted")
	h.Delete()
	if _, err := attach.IdentifyNetns(h.Path()); !errors.Is(err, attach.ErrNetnsGone) {
		t.Errorf("deleted: got %v, want ErrNetnsGone", err)
	}
	if _, err := attach.StatNetns(h.Path()); !errors.Is(err, attach.ErrNetnsGone) {
		t.Errorf("StatNetns of a deleted one: got %v, want ErrNetnsGone", err)
	}
}
