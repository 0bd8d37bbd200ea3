package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-cni/sluice/integration/oci"
	"github.com/sluice-cni/sluice/integration/pki"
	"github.com/sluice-cni/sluice/plugin/truststore"
)

// benchTrust measures the start of containers to which sluiced adds the proxy's CA, and of others, by runc. The
// container's process ends at once.
func benchTrust(b *bench) {
	starts, rounds := 100, 15
	if b.short {
		starts, rounds = 10, 2
	}
	s := &trustScene{b: b, sluiced: oci.NewSluiced(b.tb, b.tb.TempDir(), filepath.Join(b.bin, "sluice"), pki.NewCA("The proxy's CA").Cert)}
	java := oci.Image{Layers: []string{s.debian()}}
	pemAlone := oci.Image{Layers: []string{b.hiding("etc/ssl/certs/java"), s.debian()}}
	for _, c := range []struct {
		name  string
		image oci.Image
		limit float64
	}{
		{"PEM stores", pemAlone, 15}, {"PEM stores and Java's", java, 40},
	} {
		var took, cpu [2][]float64
		for i := range 2 * (starts + 1) {
			ms, cpuMS := s.start(c.image, 1, i%2 == 0)
			if i >= 2 { // the first ones are for warm-up
				took[i%2], cpu[i%2] = append(took[i%2], ms), append(cpu[i%2], cpuMS)
			}
		}
		b.add(measured("trust", "start of a container with the CA: "+c.name, median(took[0])-median(took[1]), "ms").
			atMost(c.limit).beside("with", median(took[0]), "ms").beside("without", median(took[1]), "ms").
			beside("difference of the minima", slices.Min(took[0])-slices.Min(took[1]), "ms").
			beside("CPU time more", median(cpu[0])-median(cpu[1]), "ms"))
	}
	var with, without []float64
	for range rounds {
		ms, _ := s.start(pemAlone, atOnce, true)
		with = append(with, ms)
		ms, _ = s.start(pemAlone, atOnce, false)
		without = append(without, ms)
	}
	b.add(ratio("trust", "start of 24 containers at once with the CA, relative to none", with, without).atMost(1.2).
		beside("with", median(with), "ms").beside("without", median(without), "ms"))
}

// atOnce is the number of containers that start at the same time.
const atOnce = 24

type trustScene struct {
	b       *bench
	sluiced *oci.Sluiced
}

// debian is the root of an image that has stores of all kinds.
func (s *trustScene) debian() string {
	dir, err := filepath.Abs("bin/images/debian13")
	s.b.tb.must(err, "the image")
	_, err = os.Stat(dir)
	s.b.tb.must(err, "`make bench` makes the image")
	return dir
}

// hiding makes a layer that hides a path.
func (b *bench) hiding(path string) string {
	layer := b.tb.TempDir()
	b.tb.must(os.MkdirAll(filepath.Join(layer, filepath.Dir(path)), 0o755), "the layer")
	b.tb.must(unix.Mknod(filepath.Join(layer, path), unix.S_IFCHR, 0), "hiding "+path)
	return layer
}

// start starts containers at the same time, and returns the time until all have ended, and the CPU time of runc with
// all that it has started, in ms. The CPU time hardly depends on other load of the machine.
func (s *trustScene) start(image oci.Image, count int, adjusted bool) (ms, cpu float64) {
	s.b.tb.within(func() {
		containers, commands := make([]*oci.Container, count), make([]*exec.Cmd, count)
		for i := range commands {
			c := oci.New(s.b.tb, image, "/bin/true")
			if adjusted {
				c.Adjust(s.sluiced.Adjustment(c))
			}
			c.Prepare()
			containers[i], commands[i] = c, c.Run()
		}
		errs := make([]error, count)
		var all sync.WaitGroup
		begin := time.Now()
		for i, cmd := range commands {
			all.Go(func() { errs[i] = cmd.Run() })
		}
		all.Wait()
		ms = float64(time.Since(begin)) / 1e6
		for i, err := range errs {
			s.b.tb.must(err, "runc run")
			ended := commands[i].ProcessState
			cpu += float64(ended.UserTime()+ended.SystemTime()) / 1e6
			if report := s.sluiced.Report(containers[i]); adjusted != (report.State == truststore.Trusted) {
				s.b.tb.Fatalf("the report of the hook: %+v", report)
			}
		}
	})
	return ms, cpu
}
