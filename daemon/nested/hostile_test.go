package nested

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sluice-cni/sluice/plugin/truststore"
)

// TestHostileStores: stores that lead out of a container, or are no files, are neither read nor mounted over, and the
// container goes on.
func TestHostileStores(t *testing.T) {
	outside := filepath.Join(t.TempDir(), "outside")
	must(t, os.WriteFile(outside, []byte("a file of the node\n"), 0o644))
	before := ourMounts(t) // of other tests, which run beside this one
	for name, prepare := range map[string]string{
		"a link out":       "ln -sf " + outside + " $root/" + store,
		"a link by /proc":  "mkdir -p $root/proc && ln -sf /proc/1/root" + outside + " $root/" + store,
		"a FIFO":           "rm $root/" + store + " && mkfifo $root/" + store,
		"a device":         "rm $root/" + store + " && mknod $root/" + store + " c 1 5",
		"a loop":           "ln -sf ca-certificates.crt $root/" + store,
		"a sparse file":    "truncate -s 100G $root/" + store,
		"a shared mount":   "mount --bind $root/etc $root/etc && mount --make-shared $root/etc",
		"a virtual file":   "mount --bind /proc/self/environ $root/" + store,
		"a file of random": "head -c 1000000 /dev/urandom >$root/" + store,
	} {
		t.Run(name, func(t *testing.T) {
			p := newPod(t)
			e := newEngine(t, p)
			p.run(prepare)
			p.wantEnded(1)
			p.start("echo up >/out", "--propagation=unchanged")
			p.wantEnded(2)
			if p.output() != "up\n" {
				t.Error("the container did not run")
			}
			p.run("! grep -q " + truststore.MountSource + " /proc/self/mountinfo")
			p.wantEnded(3)
			e.stop()
			data, err := os.ReadFile(outside)
			must(t, err)
			if after := ourMounts(t); string(data) != "a file of the node\n" || after != before {
				t.Errorf("something was written or mounted outside of the container: %s\n%s", data, after)
			}
		})
	}
}

// ourMounts are the lines of mountinfo about mounts of copies, as this process sees them.
func ourMounts(t *testing.T) string {
	t.Helper()
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	must(t, err)
	var ours strings.Builder
	for line := range strings.Lines(string(mounts)) {
		if strings.Contains(line, truststore.MountSource) {
			ours.WriteString(line)
		}
	}
	return ours.String()
}
