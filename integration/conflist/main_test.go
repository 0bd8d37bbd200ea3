// Package conflist tests the daemon's entry in the network configuration beside the programs that write these: the
// managers of Cilium and Multus themselves, built from their modules (integration/writers).
package conflist

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/containernetworking/cni/libcni"

	"github.com/sluice-cni/sluice/integration/docs/page"
	"github.com/sluice-cni/sluice/integration/testbed"
)

func TestMain(m *testing.M) { os.Exit(testbed.Main(m)) }

const thinMultus = "gopkg.in/k8snetworkplumbingwg/multus-cni.v4/cmd/thin_entrypoint"

var buildWriters = sync.OnceValues(func() (string, error) {
	cmd := exec.Command("go", "build", "-o", "../../bin/testing/writers/", ".", thinMultus)
	cmd.Dir = "../writers"
	out, err := cmd.CombinedOutput()
	return string(out), err
})

// writer is the path of a program of integration/writers.
func writer(t *testing.T, name string) string {
	t.Helper()
	if out, err := buildWriters(); err != nil {
		t.Fatalf("building the writers: %v: %s", err, out)
	}
	return filepath.Join(page.Root(t), "bin", "testing", "writers", name)
}

// chain returns the file that the runtime chooses in dir, and the types of its plugins; without a file, nothing.
func chain(dir string) (name string, types []string) {
	files, err := libcni.ConfFiles(dir, []string{".conf", ".conflist", ".json"})
	if err != nil {
		return "", nil
	}
	slices.Sort(files)
	for _, f := range files {
		list, err := libcni.ConfListFromFile(f)
		if filepath.Ext(f) != ".conflist" {
			var conf *libcni.NetworkConfig
			if conf, err = libcni.ConfFromFile(f); err == nil { //nolint:staticcheck // runtimes load these still
				list, err = libcni.ConfListFromConf(conf) //nolint:staticcheck // as above
			}
		}
		if err != nil {
			continue
		}
		for _, p := range list.Plugins {
			types = append(types, p.Network.Type)
		}
		return filepath.Base(f), types
	}
	return "", nil
}

// wantChain waits until the runtime would choose that file, with those plugins.
func wantChain(t *testing.T, n *testbed.Node, event, name string, types ...string) {
	t.Helper()
	testbed.Eventually(t, event+": the runtime chooses "+name+" with "+strings.Join(types, ", "), func() bool {
		gotName, got := chain(n.ConfDir)
		return gotName == name && slices.Equal(got, types)
	})
}
