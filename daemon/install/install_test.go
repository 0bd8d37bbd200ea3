package install

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/containernetworking/cni/libcni"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/sluice-cni/sluice/integration/testbed"
	"github.com/sluice-cni/sluice/plugin/attach"
)

const (
	entry  = `{"type":"sluice","backend":"auto"}`
	bridge = `{
  "cniVersion": "1.0.0",
  "x-unknown": [1.50, 1e3],
  "name": "pods",
  "plugins": [
    {"type": "bridge", "bridge":"cni0"},
    {"type": "portmap", "capabilities": {"portMappings": true}}
  ]
}
`
	conf = `{"cniVersion": "0.4.0", "name": "pods", "type": "ptp", "mtu": 1400.0}` + "\n"
)

// TestMain is also the program of an installer that exits at the step with the number TEST_DIE_AT.
func TestMain(m *testing.M) {
	if at, err := strconv.Atoi(os.Getenv("TEST_DIE_AT")); err == nil {
		n := 0
		step = func(name string) {
			n++
			if n == at {
				fmt.Println(name)
				os.Exit(9)
			}
		}
		i := nodeAt(os.Getenv("TEST_DIR"))
		if os.Getenv("TEST_UNINSTALL") != "" {
			_, err = i.Uninstall()
		} else {
			_, err = i.Install()
		}
		if err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// nodeAt is an installer on a node that has its files in dir.
func nodeAt(dir string) Installer {
	return Installer{
		ConfDir: filepath.Join(dir, "net.d"), BinDir: filepath.Join(dir, "bin"), Plugin: filepath.Join(dir, "plugin"),
		Entry: json.RawMessage(entry), StateDir: filepath.Join(dir, "state"),
	}
}

// newNode makes a node with these network configurations. It returns the installer and the node's directory.
func newNode(t *testing.T, files map[string]string) (Installer, string) {
	t.Helper()
	dir := t.TempDir()
	fill(t, dir, files)
	return nodeAt(dir), dir
}

// fill makes a node's directories, the plugin to install, and these network configurations.
func fill(t *testing.T, dir string, files map[string]string) {
	t.Helper()
	for _, d := range []string{"net.d", "bin", "state"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	put(t, filepath.Join(dir, "plugin"), "the plugin")
	for name, text := range files {
		put(t, filepath.Join(dir, "net.d", name), text)
	}
}

var unixEpoch = time.Unix(1, 0)

// put writes a file with a modification time long ago, so that it does not count as half-written.
func put(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Chtimes(path, unixEpoch, unixEpoch); err != nil {
		t.Fatal(err)
	}
}

// contents returns all files in ConfDir, by their names.
func contents(t *testing.T, i Installer) map[string]string {
	t.Helper()
	found := map[string]string{}
	entries, err := os.ReadDir(i.ConfDir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		data, err := os.ReadFile(filepath.Join(i.ConfDir, e.Name()))
		if err != nil {
			t.Fatal(err)
		}
		found[e.Name()] = string(data)
	}
	return found
}

// chosen returns the file that the runtime chooses, and its text.
func chosen(t *testing.T, i Installer) (path string, text []byte) {
	t.Helper()
	files, err := i.confFiles()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		if text, err := os.ReadFile(f); err == nil && validate(f, text) == nil {
			return f, text
		}
	}
	t.Fatalf("the runtime finds no network in %q", files)
	return "", nil
}

// plugins returns the types in the chain that the runtime would run.
func plugins(t *testing.T, i Installer) []string {
	t.Helper()
	primary, text := chosen(t, i)
	var err error
	var list *libcni.NetworkConfigList
	if isList(primary) {
		list, err = libcni.ConfListFromBytes(text)
	} else {
		var c *libcni.NetworkConfig
		if c, err = libcni.ConfFromBytes(text); err == nil { //nolint:staticcheck // runtimes load these still
			list, err = libcni.ConfListFromConf(c) //nolint:staticcheck // as above
		}
	}
	if err != nil {
		t.Fatalf("%s: %v", primary, err)
	}
	var types []string
	for _, p := range list.Plugins {
		types = append(types, p.Network.Type)
		if p.Network.Type == pluginType && !binaryInstalled(i) {
			t.Fatalf("%s names sluice, and its binary is not there or not complete", primary)
		}
	}
	return types
}

func binaryInstalled(i Installer) bool {
	return same(filepath.Join(i.BinDir, pluginType), []byte("the plugin"))
}

func TestInstallAndUninstall(t *testing.T) {
	t.Parallel()
	const oneLine = `{"name":"n","cniVersion":"1.0.0","plugins":[{"type":"x"}]}`
	bridgeChain := []string{"bridge", "portmap", "sluice"}
	for name, tc := range map[string]struct {
		files map[string]string
		chain []string
	}{
		"a conflist":       {map[string]string{"10-a.conflist": bridge}, bridgeChain},
		"one line":         {map[string]string{"10-a.conflist": oneLine}, []string{"x", "sluice"}},
		"a conf":           {map[string]string{"10-a.conf": conf}, []string{"ptp", "sluice"}},
		"a json":           {map[string]string{"10-a.json": conf}, []string{"ptp", "sluice"}},
		"the first of two": {map[string]string{"10-a.conflist": bridge, "20-b.conflist": bridge}, bridgeChain},
		"the first valid one": {map[string]string{
			"00-a.conflist": `{"name": "n"`, "01-b.conf": "{}", "10-c.conflist": bridge, "20-d.conf": conf,
		}, bridgeChain},
		"with CRLF line ends": {map[string]string{
			"10-a.conflist": strings.ReplaceAll(bridge, "\n", "\r\n"),
		}, bridgeChain},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			i, _ := newNode(t, tc.files)
			for range 2 {
				if _, err := i.Install(); err != nil {
					t.Fatalf("Install: %v", err)
				}
				if got := plugins(t, i); !slices.Equal(got, tc.chain) {
					t.Errorf("got the chain %v, want %v", got, tc.chain)
				}
			}
			if written, err := i.Install(); err != nil || len(written) > 0 {
				t.Errorf("a second time: wrote %v, %v", written, err)
			}
			if n, err := i.Uninstall(); err != nil || n != 0 {
				t.Fatalf("Uninstall: %d, %v", n, err)
			}
			if got := contents(t, i); fmt.Sprint(got) != fmt.Sprint(tc.files) {
				t.Errorf("after Uninstall: got %q, want %q", got, tc.files)
			}
			if _, err := os.Stat(filepath.Join(i.BinDir, pluginType)); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("the binary: %v, want os.ErrNotExist", err)
			}
		})
	}
}

// TestConfOfAnotherProgram: the program writes its .conf again, removes it, and makes it anew, beside sluice.
func TestConfOfAnotherProgram(t *testing.T) {
	t.Parallel()
	i, _ := newNode(t, map[string]string{"10-a.conf": conf, "20-b.conflist": bridge})
	path := filepath.Join(i.ConfDir, "10-a.conf")
	want := func(event string, chain ...string) {
		t.Helper()
		if _, err := i.Install(); err != nil {
			t.Fatalf("%s: %v", event, err)
		}
		if got := plugins(t, i); !slices.Equal(got, chain) {
			t.Errorf("%s: got the chain %v, want %v", event, got, chain)
		}
	}
	want("at first", "ptp", "sluice")
	put(t, path, strings.Replace(conf, "1400.0", "1300", 1))
	want("the file is written again", "ptp", "sluice")
	if _, text := chosen(t, i); !strings.Contains(string(text), "1300") {
		t.Errorf("the runtime has %s, want the file as it was written again", text)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	want("the file is removed", "bridge", "portmap", "sluice")
	if got := contents(t, i); len(got) != 1 {
		t.Errorf("the file is removed: got %q, want nothing left of it", got)
	}
	put(t, path, conf)
	want("the file is made anew", "ptp", "sluice")
	if _, err := i.Uninstall(); err != nil {
		t.Fatal(err)
	}
	files := map[string]string{"10-a.conf": conf, "20-b.conflist": bridge}
	if got := contents(t, i); !maps.Equal(got, files) {
		t.Errorf("after Uninstall: got %q, want %q", got, files)
	}
}

// TestCopyKeepsEntriesOfOthers: another program that chains itself (Istio's) takes the copy for the runtime's file.
func TestCopyKeepsEntriesOfOthers(t *testing.T) {
	t.Parallel()
	i, _ := newNode(t, map[string]string{"10-a.conf": conf})
	if _, err := i.Install(); err != nil {
		t.Fatal(err)
	}
	path, text := chosen(t, i)
	put(t, path, strings.Replace(string(text), entry, entry+`, {"type": "istio-cni"}`, 1))
	if _, err := i.Install(); err != nil {
		t.Fatal(err)
	}
	if got, want := plugins(t, i), []string{"ptp", "istio-cni", "sluice"}; !slices.Equal(got, want) {
		t.Errorf("got the chain %v, want %v", got, want)
	}
}

// TestOnlyNetworkIsRemoved: a node without a network says so, and calls no plugin that is gone.
func TestOnlyNetworkIsRemoved(t *testing.T) {
	t.Parallel()
	i, _ := newNode(t, map[string]string{"10-a.conf": conf})
	if _, err := i.Install(); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(filepath.Join(i.ConfDir, "10-a.conf")); err != nil {
		t.Fatal(err)
	}
	if _, err := i.Install(); !errors.Is(err, ErrNoNetwork) {
		t.Errorf("got %v, want ErrNoNetwork", err)
	}
	if got := contents(t, i); len(got) > 0 {
		t.Errorf("got %q, want nothing left", got)
	}
}

// TestCopyThatAnotherFileNames: Multus has found the copy beside its original, and names it. Without the copy, every
// ADD would fail.
func TestCopyThatAnotherFileNames(t *testing.T) {
	t.Parallel()
	i, _ := newNode(t, map[string]string{"10-a.conf": conf})
	if _, err := i.Install(); err != nil {
		t.Fatal(err)
	}
	put(t, filepath.Join(i.ConfDir, "00-multus.conf"), `{"cniVersion":"0.4.0","name":"multus","type":"multus-shim",`+
		`"clusterNetwork":"/host/etc/cni/net.d/10-a-by-sluice.conflist"}`)
	if _, err := i.Install(); err != nil {
		t.Fatal(err)
	}
	if got, want := plugins(t, i), []string{"multus-shim", "sluice"}; !slices.Equal(got, want) {
		t.Errorf("got the chain %v, want %v", got, want)
	}
	if _, err := i.Uninstall(); err != nil {
		t.Fatal(err)
	}
	if got := contents(t, i); strings.Contains(fmt.Sprint(got), entry) || got["10-a-by-sluice.conflist"] == "" {
		t.Errorf("after Uninstall: got %q, want the copy that is named, and no entry", got)
	}
}

// TestEntryInCopiedDelegates: Multus alone, before CNI 1.0.0, copies the network of pods into its own .conf.
func TestEntryInCopiedDelegates(t *testing.T) {
	t.Parallel()
	const head = `{"cniVersion": "0.4.0", "name": "multus-cni-network", "type": "multus", "delegates": [ `
	const second = `, {"cniVersion": "0.4.0", "name": "n2", "plugins": [{"type": "macvlan"}]}]}` + "\n"
	for name, tc := range map[string]struct{ delegate, with, after string }{
		"a conflist": {
			`{"cniVersion":"0.4.0","name":"n","plugins":[{"type":"ptp"}]}`,
			`{"cniVersion":"0.4.0","name":"n","plugins":[{"type":"ptp"},` + entry + `]}`, "",
		},
		"a conflist with an entry of before": {
			`{"cniVersion":"0.4.0","name":"n","plugins":[{"type":"sluice","backend":"x"},{"type":"ptp"}]}`,
			`{"cniVersion":"0.4.0","name":"n","plugins":[{"type":"ptp"},` + entry + `]}`,
			`{"cniVersion":"0.4.0","name":"n","plugins":[{"type":"ptp"}]}`,
		},
		"a single plugin without a name": {
			`{"type":"ptp"}`,
			"{\n  \"cniVersion\": \"0.4.0\",\n  \"name\": \"multus-cni-network\",\n" +
				"  \"plugins\": [\n    {\"type\":\"ptp\"},\n    " + entry + "\n  ]\n}",
			"{\n  \"cniVersion\": \"0.4.0\",\n  \"name\": \"multus-cni-network\",\n" +
				"  \"plugins\": [\n    {\"type\":\"ptp\"}\n  ]\n}",
		},
	} {
		files := map[string]string{"00-multus.conf": head + tc.delegate + second, "10-a.conflist": bridge}
		i, _ := newNode(t, files)
		for range 2 {
			if _, err := i.Install(); err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			files["00-multus.conf"] = head + tc.with + second
			if got := contents(t, i); !maps.Equal(got, files) {
				t.Errorf("%s: got %q, want %q", name, got, files)
			}
		}
		if _, err := i.Uninstall(); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		files["00-multus.conf"] = head + cmp.Or(tc.after, tc.delegate) + second
		if got := contents(t, i); !maps.Equal(got, files) {
			t.Errorf("%s: after Uninstall: got %q, want %q", name, got, files)
		}
	}
}

func TestEntryIsReplaced(t *testing.T) {
	t.Parallel()
	i, _ := newNode(t, map[string]string{"10-a.conflist": bridge, "20-b.conflist": bridge})
	if _, err := i.Install(); err != nil {
		t.Fatal(err)
	}
	first := contents(t, i)["10-a.conflist"]
	i.Entry = json.RawMessage(`{"type":"sluice","backend":"nftables"}`)
	if _, err := i.Install(); err != nil {
		t.Fatal(err)
	}
	if got, want := contents(t, i)["10-a.conflist"], strings.Replace(first, `"auto"`, `"nftables"`, 1); got != want {
		t.Errorf("another entry: got\n%s\nwant\n%s", got, want)
	}
	// A new file sorts first: the entry moves there.
	put(t, filepath.Join(i.ConfDir, "05-new.conflist"), bridge)
	if _, err := i.Install(); err != nil {
		t.Fatal(err)
	}
	if got := contents(t, i); got["10-a.conflist"] != bridge || !strings.Contains(got["05-new.conflist"], "nftables") {
		t.Errorf("with a new first file: got %q", got)
	}
	// A file was edited by hand: it has sluice twice, and not last.
	put(t, filepath.Join(i.ConfDir, "05-new.conflist"), `{"name":"n","cniVersion":"1.0.0",`+
		`"plugins":[{"type":"sluice"}, {"type":"x"},{"type":"sluice"} ,{"type":"y"}]}`)
	if _, err := i.Install(); err != nil {
		t.Fatal(err)
	}
	if got, want := plugins(t, i), []string{"x", "y", "sluice"}; !slices.Equal(got, want) {
		t.Errorf("with two entries: got the chain %v, want %v", got, want)
	}
}

// unserved are network configurations that no version of the plugin serves, and a part of the error for each.
var unserved = map[string]struct{ name, text, want string }{
	"no version": {
		"10-a.conflist", `{"name":"n","plugins":[{"type":"x"}]}`, "it has no cniVersion",
	},
	"0.1.0": {
		"10-a.conflist", `{"cniVersion":"0.1.0","name":"n","plugins":[{"type":"x"}]}`, `cniVersion is "0.1.0"`,
	},
	"0.2.0": {
		"10-a.conflist", `{"cniVersion":"0.2.0","name":"n","plugins":[{"type":"x"}]}`, `cniVersion is "0.2.0"`,
	},
	"a newer one": {
		"10-a.conflist", `{"cniVersion":"9.9.9","name":"n","plugins":[{"type":"x"}]}`, `cniVersion is "9.9.9"`,
	},
	"a newer one in the list": {
		"10-a.conflist", `{"cniVersion":"1.0.0","cniVersions":["1.0.0","9.9.9"],"name":"n","plugins":[{"type":"x"}]}`,
		`cniVersions has "9.9.9"`,
	},
	"only in the list, which older runtimes do not read": {
		"10-a.conflist", `{"cniVersions":["1.0.0"],"name":"n","plugins":[{"type":"x"}]}`, "it has no cniVersion",
	},
	"no version of a single plugin": {"10-a.conf", `{"name":"n","type":"x"}`, "it has no cniVersion"},
	"0.2.0 of a single plugin":      {"10-a.json", `{"cniVersion":"0.2.0","name":"n","type":"x"}`, `"0.2.0"`},
}

// TestUnservedVersion: with the entry, every ADD and DEL of the node would fail.
func TestUnservedVersion(t *testing.T) {
	t.Parallel()
	for name, tc := range unserved {
		files := map[string]string{tc.name: tc.text, "20-b.conflist": bridge}
		i, _ := newNode(t, files)
		_, err := i.Install()
		file := filepath.Join(i.ConfDir, tc.name)
		got := fmt.Sprint(err)
		if !errors.Is(err, errVersion) || !strings.Contains(got, file) || !strings.Contains(got, tc.want) {
			t.Errorf("%s: got %v, want an error with the file and %q", name, err, tc.want)
		}
		if got := contents(t, i); fmt.Sprint(got) != fmt.Sprint(files) {
			t.Errorf("%s: got %q, want the files unchanged", name, got)
		}
	}
}

// TestServedVersions: each is installed into, also beside others that no runtime would choose.
func TestServedVersions(t *testing.T) {
	t.Parallel()
	for _, version := range []string{
		`"cniVersion":"0.3.0"`, `"cniVersion":"0.3.1"`, `"cniVersion":"0.4.0"`, `"cniVersion":"1.0.0"`,
		`"cniVersion":"1.1.0"`, `"cniVersion":"1.0.0","cniVersions":["0.2.0","0.4.0","1.0.0","1.1.0"]`,
	} {
		i, _ := newNode(t, map[string]string{"10-a.conflist": `{` + version + `,"name":"n","plugins":[{"type":"x"}]}`})
		if _, err := i.Install(); err != nil {
			t.Errorf("%s: %v", version, err)
		} else if got := plugins(t, i); !slices.Contains(got, pluginType) {
			t.Errorf("%s: got the chain %v, want sluice in it", version, got)
		}
	}
}

// TestEntryLeavesAnUnservedVersion: another program has changed the version of a file that has the entry.
func TestEntryLeavesAnUnservedVersion(t *testing.T) {
	t.Parallel()
	i, _ := newNode(t, map[string]string{"10-a.conflist": bridge})
	if _, err := i.Install(); err != nil {
		t.Fatal(err)
	}
	const from, to = `"cniVersion": "1.0.0"`, `"cniVersion": "0.2.0"`
	put(t, filepath.Join(i.ConfDir, "10-a.conflist"), strings.Replace(contents(t, i)["10-a.conflist"], from, to, 1))
	if _, err := i.Install(); !errors.Is(err, errVersion) {
		t.Errorf("got %v, want errVersion", err)
	}
	if got, want := contents(t, i)["10-a.conflist"], strings.Replace(bridge, from, to, 1); got != want {
		t.Errorf("got\n%s\nwant the file without the entry:\n%s", got, want)
	}
}

func TestNoNetwork(t *testing.T) {
	t.Parallel()
	for name, files := range map[string]map[string]string{
		"an empty directory": {},
		"no valid file": {
			"a.conflist": "{", "b.conf": `{"name":"n"}`, "d.conflist": bridge + "x",
			"c.conflist": `{"name":"n","cniVersion":"1.0.0","plugins":[]}`,
		},
		"no network configuration": {"README": "x", "10-a.conflist.bak": bridge},
	} {
		i, _ := newNode(t, files)
		if _, err := i.Install(); !errors.Is(err, ErrNoNetwork) {
			t.Errorf("%s: got %v, want ErrNoNetwork", name, err)
		}
		if got := contents(t, i); fmt.Sprint(got) != fmt.Sprint(files) {
			t.Errorf("%s: got %q, want it unchanged", name, got)
		}
	}
	i, dir := newNode(t, nil)
	i.ConfDir = filepath.Join(dir, "absent")
	if _, err := i.Install(); !errors.Is(err, ErrNoNetwork) {
		t.Errorf("no directory: got %v, want ErrNoNetwork", err)
	}
}

// TestHalfWrittenFile: Install neither skips a file that is being written nor adds the entry to it.
func TestHalfWrittenFile(t *testing.T) {
	t.Parallel()
	i, _ := newNode(t, map[string]string{"20-b.conflist": bridge})
	half := filepath.Join(i.ConfDir, "10-a.conflist")
	if err := os.WriteFile(half, []byte(bridge[:40]), 0o644); err != nil { // now
		t.Fatal(err)
	}
	if _, err := i.Install(); !errors.Is(err, ErrNoNetwork) || !strings.Contains(err.Error(), half) {
		t.Errorf("got %v, want ErrNoNetwork, naming the file", err)
	}
	put(t, half, bridge)
	if _, err := i.Install(); err != nil {
		t.Fatal(err)
	}
	if got := contents(t, i); got["20-b.conflist"] != bridge || !strings.Contains(got["10-a.conflist"], pluginType) {
		t.Errorf("when it is complete: got %q", got)
	}
}

// TestOwnerWritesAtTheSameTime: the owner of a file writes it after Install has read it. That is not lost.
func TestOwnerWritesAtTheSameTime(t *testing.T) {
	t.Parallel()
	i, _ := newNode(t, map[string]string{"10-a.conflist": bridge})
	path := filepath.Join(i.ConfDir, "10-a.conflist")
	const newer = `{"name":"n","cniVersion":"1.0.0","plugins":[{"type":"newer"}]}`
	_, err := i.edit(path, func(text []byte) ([]byte, error) {
		put(t, path, newer)
		return withEntry(text, i.Entry)
	})
	if !errors.Is(err, ErrNoNetwork) || !strings.Contains(err.Error(), path) {
		t.Errorf("got %v, want ErrNoNetwork, naming the file", err)
	}
	if got := contents(t, i); !maps.Equal(got, map[string]string{"10-a.conflist": newer}) {
		t.Errorf("got %q, want what the owner wrote", got)
	}
}

// TestHalfWrittenBeforeTheClockJumpedBack: Install skips an invalid file from the future, and does not wait until the
// clock gets there.
func TestHalfWrittenBeforeTheClockJumpedBack(t *testing.T) {
	t.Parallel()
	i, _ := newNode(t, map[string]string{"20-b.conflist": bridge})
	half := filepath.Join(i.ConfDir, "10-a.conflist")
	put(t, half, bridge[:40])
	soon := time.Now().Add(time.Hour)
	if err := os.Chtimes(half, soon, soon); err != nil {
		t.Fatal(err)
	}
	if written, err := i.Install(); err != nil || !slices.Contains(written, filepath.Join(i.ConfDir, "20-b.conflist")) {
		t.Errorf("Install: got %q, %v; want the entry in the other file", written, err)
	}
}

func TestBinaryStaysForDELs(t *testing.T) {
	t.Parallel()
	i, _ := newNode(t, map[string]string{"10-a.conflist": bridge})
	if _, err := i.Install(); err != nil {
		t.Fatal(err)
	}
	store := attach.NewStore(i.StateDir)
	attachment := attach.Attachment{ID: attach.ID{ContainerID: "c1", IfName: "eth0"}, Netns: "/run/netns/x"}
	r := attach.Record{Attachment: attachment, State: attach.Passed}
	if err := store.Write(r); err != nil {
		t.Fatal(err)
	}
	if n, err := i.Uninstall(); n != 1 || err != nil {
		t.Errorf("Uninstall: got %d, %v; want one attachment", n, err)
	}
	if !binaryInstalled(i) || contents(t, i)["10-a.conflist"] != bridge {
		t.Error("want the binary there, and the entry gone")
	}
	if err := store.Remove(r.ID); err != nil {
		t.Fatal(err)
	}
	if n, err := i.Uninstall(); n != 0 || err != nil {
		t.Errorf("Uninstall, without attachments: got %d, %v; want none", n, err)
	}
}

// TestKilledAtEveryStep kills Install and Uninstall at each of their steps. The runtime must find a valid network after
// it, and the next Install or Uninstall must complete.
func TestKilledAtEveryStep(t *testing.T) {
	t.Parallel()
	for name, files := range map[string]map[string]string{
		"conflist": {"10-a.conflist": bridge, "20-b.conflist": bridge},
		"conf":     {"10-a.conf": conf, "20-b.conflist": bridge},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			bare := []string{"bridge", "portmap"}
			if name == "conf" {
				bare = []string{"ptp"}
			}
			whole := append(slices.Clone(bare), "sluice")
			for at := 1; ; at++ {
				i, dir := newNode(t, files)
				died := dieAt(t, at, dir, "")
				if got := plugins(t, i); !slices.Equal(got, bare) && !slices.Equal(got, whole) {
					t.Fatalf("Install killed at %q: got the chain %v", died, got)
				}
				if _, err := i.Install(); err != nil {
					t.Fatalf("Install after one was killed at %q: %v", died, err)
				}
				if got := plugins(t, i); !slices.Equal(got, whole) {
					t.Fatalf("Install after one was killed at %q: got the chain %v", died, got)
				}
				undone := dieAt(t, at, dir, "1")
				if got := plugins(t, i); !slices.Equal(got, bare) && !slices.Equal(got, whole) {
					t.Fatalf("Uninstall killed at %q: got the chain %v", undone, got)
				}
				if _, err := i.Uninstall(); err != nil {
					t.Fatalf("Uninstall after one was killed at %q: %v", undone, err)
				}
				if got := contents(t, i); fmt.Sprint(got) != fmt.Sprint(files) {
					t.Fatalf("Uninstall after one was killed at %q: got the files %q", undone, got)
				}
				if died == "" && undone == "" {
					if at < 10 {
						t.Errorf("got only %d steps, want 10 or more", at)
					}
					return
				}
			}
		})
	}
}

// dieAt runs an installer that exits at step number at. It returns the name of that step, "" if there are fewer steps.
func dieAt(t *testing.T, at int, dir, uninstall string) string {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), fmt.Sprint("TEST_DIE_AT=", at), "TEST_DIR="+dir, "TEST_UNINSTALL="+uninstall)
	out, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	switch {
	case err == nil:
		return ""
	case errors.As(err, &exit) && exit.ExitCode() == 9:
		return strings.TrimSpace(string(out))
	}
	t.Fatalf("%v: %s", err, out)
	return ""
}

// TestFullDisk leaves ever more room on a disk, from none. The node's network must work at each size, and Install must
// complete as soon as there is enough room.
func TestFullDisk(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Fatal("this test mounts a small file system: run it as root")
	}
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=64k"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	fill(t, dir, map[string]string{"10-a.conflist": bridge})
	i := nodeAt(dir)
	ballast := filepath.Join(dir, "ballast")
	for full := 64 << 10; full > 0; full -= 4 << 10 {
		_ = os.Remove(ballast)
		_ = os.WriteFile(ballast, make([]byte, full), 0o600) // as much as there is room for
		_, err := i.Install()
		chain := plugins(t, i)
		if want := err == nil; slices.Contains(chain, "sluice") != want || !slices.Contains(chain, "bridge") {
			t.Fatalf("with %d bytes of ballast: %v, and the chain %v", full, err, chain)
		}
		if err == nil {
			if full == 64<<10 {
				t.Fatal("the disk was never full")
			}
			return
		}
	}
	t.Error("Install never had enough room")
}

// withoutOverride calls do as root without the capability DAC_OVERRIDE, for which the owner of a directory decides.
func withoutOverride(t *testing.T, do func()) {
	t.Helper()
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // and the thread ends with the goroutine
		header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
		var caps [2]unix.CapUserData
		err := unix.Capget(&header, &caps[0])
		if err == nil {
			const override = 1<<unix.CAP_DAC_OVERRIDE | 1<<unix.CAP_DAC_READ_SEARCH
			caps[0].Effective &^= override
			caps[0].Permitted &^= override
			err = unix.Capset(&header, &caps[0])
		}
		if err == nil {
			do()
		}
		done <- err
	}()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
}

// TestDirectoriesOfAnotherUser: without DAC_OVERRIDE nothing is touched, and the error says what is missing. With it
// the files keep their owner.
func TestDirectoriesOfAnotherUser(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Skip("only root has capabilities to lose")
	}
	const owner = 1000
	i, dir := newNode(t, map[string]string{"10-net.conflist": bridge})
	for _, path := range []string{i.ConfDir, i.BinDir, filepath.Join(i.ConfDir, "10-net.conflist")} {
		if err := os.Chown(path, owner, owner); err != nil {
			t.Fatal(err)
		}
	}
	before := contents(t, i)
	withoutOverride(t, func() {
		_, err := i.Install()
		for _, want := range []string{"belongs to user 1000", "DAC_OVERRIDE", i.ConfDir, i.BinDir} {
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("without DAC_OVERRIDE: got %v, want an error with %q", err, want)
			}
		}
	})
	if after := contents(t, i); !maps.Equal(before, after) || binaryInstalled(i) {
		t.Errorf("the refused installation has changed %q to %q", before, after)
	}
	if _, err := i.Install(); err != nil {
		t.Fatal(err)
	}
	info, err := os.Stat(filepath.Join(i.ConfDir, "10-net.conflist"))
	if err != nil || info.Sys().(*syscall.Stat_t).Uid != owner || !binaryInstalled(i) {
		t.Errorf("in %s: got %+v, %v; want the owner kept", dir, info, err)
	}
}

// TestUnreadableConfiguration: the runtime may be able to read a file that this process cannot, and choose it.
func TestUnreadableConfiguration(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Skip("only root has capabilities to lose")
	}
	i, _ := newNode(t, map[string]string{"10-net.conflist": bridge, "20-other.conflist": bridge})
	first := filepath.Join(i.ConfDir, "10-net.conflist")
	if err := errors.Join(os.Chmod(first, 0o600), os.Chown(first, 1000, 1000)); err != nil {
		t.Fatal(err)
	}
	withoutOverride(t, func() {
		if _, err := i.Install(); !errors.Is(err, os.ErrPermission) || !strings.Contains(err.Error(), first) {
			t.Errorf("got %v, want that %s cannot be read", err, first)
		}
	})
}

// TestRemovePlugin: after an uninstallation the binary goes with the last attachment, unless another daemon has
// installed the plugin again.
func TestRemovePlugin(t *testing.T) {
	t.Parallel()
	i, _ := newNode(t, map[string]string{"10-net.conflist": bridge})
	store := attach.NewStore(i.StateDir)
	record := attach.Record{Attachment: attach.Attachment{ID: attach.ID{ContainerID: "c", IfName: "eth0"}}}
	record.State = attach.Passed
	want := func(when string, installed bool) {
		t.Helper()
		if err := i.RemovePlugin(); err != nil {
			t.Errorf("%s: %v", when, err)
		}
		if got := binaryInstalled(i); got != installed {
			t.Errorf("%s: the binary is there: %t, want %t", when, got, installed)
		}
	}
	if _, err := i.Install(); err != nil {
		t.Fatal(err)
	}
	want("while the plugin is installed", true)
	if err := store.Write(record); err != nil {
		t.Fatal(err)
	}
	if n, err := i.Uninstall(); n != 1 || err != nil {
		t.Fatalf("Uninstall: %d, %v", n, err)
	}
	want("while a pod is attached", true)
	if err := store.RemovePassed(); err != nil {
		t.Fatal(err)
	}
	want("without attachments", false)
}

// TestConcurrentInstallers: a daemon and the one that replaces it may both install while `sluiced uninstall` runs.
func TestConcurrentInstallers(t *testing.T) {
	t.Parallel()
	i, _ := newNode(t, map[string]string{"10-a.conflist": bridge})
	other := i
	other.Entry = json.RawMessage(`{"type":"sluice","backend":"nftables","excludeNamespaces":["kube-system"]}`)
	var g errgroup.Group
	for range 3 {
		for _, act := range []func() error{
			func() error { _, err := i.Install(); return err },
			func() error { _, err := other.Install(); return err },
			func() error { _, err := i.Uninstall(); return err },
		} {
			g.Go(func() error {
				for range 20 {
					if err := act(); err != nil {
						return err
					}
					if _, err := i.primary(); err != nil {
						return err // no valid network at this moment
					}
				}
				return nil
			})
		}
	}
	if err := g.Wait(); err != nil {
		t.Error(err)
	}
	if _, err := i.Uninstall(); err != nil {
		t.Fatal(err)
	}
	if got := contents(t, i)["10-a.conflist"]; got != bridge {
		t.Errorf("got %q, want the file as it was before", got)
	}
}

// TestKeeperInstallsAgain after other programs have changed, replaced or removed its files.
func TestKeeperInstallsAgain(t *testing.T) {
	t.Parallel()
	i, dir := newNode(t, nil)
	k := &Keeper{Installer: i, Log: slog.New(slog.DiscardHandler)}
	if k.Ready() == nil {
		t.Error("ready before the first scan")
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- k.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
		if !slices.Contains(plugins(t, i), "sluice") {
			t.Error("the Keeper has uninstalled the plugin at its end")
		}
	})
	testbed.Eventually(t, "the Keeper waits for a network", func() bool { return errors.Is(k.Ready(), ErrNoNetwork) })
	installedAfter := func(change string) {
		t.Helper()
		testbed.Eventually(t, change+": the plugin is installed", func() bool {
			if _, err := i.primary(); err != nil {
				return false
			}
			_, text := chosen(t, i)
			return strings.Contains(string(text), entry) && binaryInstalled(i) && k.Ready() == nil
		})
	}
	main := filepath.Join(i.ConfDir, "10-a.conflist")
	put(t, main, bridge)
	installedAfter("a conflist appears")
	put(t, main, strings.Replace(bridge, "cni0", "cni1", 1))
	installedAfter("the conflist is written again")
	put(t, filepath.Join(dir, "other"), bridge)
	if err := os.Rename(filepath.Join(dir, "other"), main); err != nil {
		t.Fatal(err)
	}
	installedAfter("the conflist is replaced")
	old := strings.Replace(bridge, `"1.0.0"`, `"0.2.0"`, 1)
	put(t, main, old)
	testbed.Eventually(t, "the Keeper says that the version is not served, and leaves the file", func() bool {
		return errors.Is(k.Ready(), errVersion) && contents(t, i)["10-a.conflist"] == old
	})
	put(t, main, bridge)
	installedAfter("the conflist has another version")
	put(t, filepath.Join(i.ConfDir, "05-a.conf"), conf)
	installedAfter("a conf that sorts first appears")
	if err := os.Remove(filepath.Join(i.BinDir, "sluice")); err != nil {
		t.Fatal(err)
	}
	installedAfter("the binary is removed")
	if err := os.Rename(i.ConfDir, filepath.Join(dir, "gone")); err != nil {
		t.Fatal(err)
	}
	testbed.Eventually(t, "the Keeper sees that the directory is gone", func() bool { return k.Ready() != nil })
	fill(t, dir, map[string]string{"10-a.conflist": bridge})
	installedAfter("the directory is made again")
}

// TestUninstallWhileTheKeeperRuns: the daemon need not be stopped before `sluiced uninstall`. It installs again only
// when it is started again.
func TestUninstallWhileTheKeeperRuns(t *testing.T) {
	t.Parallel()
	i, _ := newNode(t, map[string]string{"10-a.conflist": bridge})
	for range 2 {
		k := &Keeper{Installer: i, Log: slog.New(slog.DiscardHandler)}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		if err := k.Begin(); err != nil {
			t.Fatal(err)
		}
		go func() { done <- k.Run(ctx) }()
		testbed.Eventually(t, "the plugin is installed", func() bool { return k.Ready() == nil })
		if _, err := i.Uninstall(); err != nil {
			t.Fatal(err)
		}
		testbed.Eventually(t, "the Keeper has seen the uninstall", func() bool {
			return errors.Is(k.Ready(), errUninstalled)
		})
		if got := contents(t, i)["10-a.conflist"]; got != bridge {
			t.Errorf("got %q, want the file as it was before", got)
		}
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
	}
}

// TestUninstallWithoutTheMark: the file that marks the node cannot be written, as on a full disk. The entry goes all
// the same, and the Keeper does not put it back.
func TestUninstallWithoutTheMark(t *testing.T) {
	t.Parallel()
	i, _ := newNode(t, map[string]string{"10-a.conflist": bridge})
	k := &Keeper{Installer: i, Log: slog.New(slog.DiscardHandler)}
	if err := k.Begin(); err != nil {
		t.Fatal(err)
	}
	k.rescan(&backoff{})
	if err := k.Ready(); err != nil {
		t.Fatal(err)
	}
	mark := attach.UninstalledMark(i.StateDir)
	if err := os.Symlink(filepath.Join(t.TempDir(), "no", "such", "folder"), mark); err != nil {
		t.Fatal(err)
	}
	if n, err := k.Uninstall(); n != 0 || !errors.Is(err, os.ErrNotExist) || !strings.Contains(err.Error(), mark) {
		t.Errorf("Uninstall: got %d, %v; want the error about %s", n, err, mark)
	}
	k.rescan(&backoff{})
	if got := contents(t, i)["10-a.conflist"]; got != bridge || binaryInstalled(i) {
		t.Errorf("got %q, binary: %t; want the file as it was before, and no binary", got, binaryInstalled(i))
	}
	if err := k.Ready(); !errors.Is(err, errUninstalled) {
		t.Errorf("the Keeper: got %v", err)
	}
}

// TestContest begins when another program has undone the installation too often, and ends after a quiet period.
func TestContest(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct{ theirs, file, want string }{
		"Cilium": {
			strings.Replace(bridge, `"bridge", "bridge"`, `"cilium-cni", "bridge"`, 1), "",
			"most likely Cilium, whose plugin cilium-cni is in it; set cni.exclusive=false",
		},
		"Cilium, chained to another plugin": {
			bridge, "20-b.conflist.cilium_bak",
			"most likely Cilium, which has renamed a file to 20-b.conflist.cilium_bak; set cni.exclusive=false",
		},
		"flannel": {
			strings.Replace(bridge, `"bridge", "bridge"`, `"flannel", "bridge"`, 1), "",
			"most likely flannel, whose plugin flannel is in it; it has no setting to keep chained plugins",
		},
		"Calico": {
			strings.Replace(bridge, `"bridge", "bridge"`, `"calico", "bridge"`, 1), "",
			"writes its file only when its pod calico-node starts",
		},
		"the Amazon VPC CNI": {
			strings.Replace(bridge, `"bridge", "bridge"`, `"aws-cni", "bridge"`, 1), "",
			"writes its file only when its pod aws-node starts",
		},
		"Multus": {
			strings.Replace(bridge, `"bridge", "bridge"`, `"multus-shim", "bridge"`, 1), "",
			"with a file of your own (multusConfigFile",
		},
		"an unknown one": {bridge, "", "which has the plugins bridge, portmap: find the owner of that file"},
	} {
		files := map[string]string{"10-a.conflist": tc.theirs}
		if tc.file != "" {
			files[tc.file] = bridge
		}
		i, _ := newNode(t, files)
		k := &Keeper{Installer: i, Log: slog.New(slog.DiscardHandler)}
		path := filepath.Join(i.ConfDir, "10-a.conflist")
		var b backoff
		for n := range maxRewrites + 1 {
			if got := k.Contest(); got != (attach.Contest{}) {
				t.Fatalf("%s: undone %d times: got %+v, want no contest", name, n, got)
			}
			put(t, path, tc.theirs)
			k.rescan(&b)
		}
		c := k.Contest()
		if !strings.Contains(c.Reason, path) || !strings.Contains(c.Reason, tc.want) || c.Since.IsZero() {
			t.Errorf("%s: got %+v, want the file and %q", name, c, tc.want)
		}
		if err := k.Ready(); err == nil || err.Error() != c.Reason {
			t.Errorf("%s: Ready: got %v, want the contest", name, err)
		}
		if got := k.Undone(); got != maxRewrites {
			t.Errorf("%s: undone: got %d, want %d", name, got, maxRewrites)
		}
		k.rescan(&b)
		if got := k.Contest(); got != c {
			t.Errorf("%s: after one look without a change: got %+v, want the same contest", name, got)
		}
		b.last = b.last.Add(-2 * quietPeriod)
		k.rescan(&b)
		if err := k.Ready(); err != nil || k.Contest() != (attach.Contest{}) {
			t.Errorf("%s: after a quiet period: got %v, %+v; want the end of the contest", name, err, k.Contest())
		}
	}
}

// TestContestedBinary: another program removes the plugin again and again.
func TestContestedBinary(t *testing.T) {
	t.Parallel()
	i, _ := newNode(t, map[string]string{"10-a.conflist": bridge})
	k := &Keeper{Installer: i, Log: slog.New(slog.DiscardHandler)}
	path := filepath.Join(i.BinDir, pluginType)
	var b backoff
	for range maxRewrites + 1 {
		k.rescan(&b)
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
	}
	if got := k.Contest().Reason; !strings.Contains(got, "keeps changing or removing "+path) {
		t.Errorf("got the reason %q, want one that names %s", got, path)
	}
}

func TestBackoff(t *testing.T) {
	t.Parallel()
	var b backoff
	now := unixEpoch
	for n := range maxRewrites {
		if b.wrote("a", now) {
			t.Fatalf("write %d: got too often, want it allowed", n+1)
		}
	}
	last := b.wait(now)
	for range 20 {
		if !b.wrote("a", now) {
			t.Fatal("got allowed, want too often")
		}
		if got := b.wait(now); got < last || got > maxWait {
			t.Errorf("got a wait of %s after one of %s", got, last)
		}
		last = b.wait(now)
		now = now.Add(last)
	}
	if last != maxWait {
		t.Errorf("got a last wait of %s, want %s", last, maxWait)
	}
	if b.wrote("b", now) || b.wrote("a", now.Add(2*quietPeriod)) {
		t.Error("got too often, for another file or after a quiet period")
	}
}

// FuzzEntry checks that adding the entry to any valid conflist gives a valid one with the entry last, that doing so
// again changes nothing, and that removing the entry gives the first text back.
func FuzzEntry(f *testing.F) {
	for _, text := range []string{
		bridge, `{"plugins":[{"type":"x"}]}`, conf, "{",
		`{"name":"n","cniVersion":"1.0.0","plugins":[{"type":"x"}],"plugins":[{"type":"y"} ]}`,
	} {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		if validate("x.conflist", text) != nil {
			return
		}
		with, err := withEntry(text, []byte(entry))
		if err != nil {
			return
		}
		if err := validate("x.conflist", with); err != nil {
			t.Fatalf("with the entry, %q is not valid: %v", with, err)
		}
		list, err := libcni.ConfListFromBytes(with)
		if err != nil || list.Plugins[len(list.Plugins)-1].Network.Type != pluginType {
			t.Fatalf("with the entry, %q: libcni does not read it as the last plugin, %v", with, err)
		}
		if got, err := withoutEntry(with); count(text) == 0 && (err != nil || !bytes.Equal(got, text)) {
			t.Fatalf("got %q back, %v; want %q", got, err, text)
		}
		again, err := withEntry(with, []byte(entry))
		if err != nil || !bytes.Equal(again, with) {
			t.Fatalf("a second time: got %q, %v; want %q", again, err, with)
		}
	})
}
