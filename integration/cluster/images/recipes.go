package images

import (
	"debug/elf"
	"fmt"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"
)

const architecture = runtime.GOARCH

const searchPath = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// Named makes the image that is called tools, sluice or mitmproxy, with programs of the caller's.
func Named(name string, programs []string) (Image, error) {
	switch name {
	case "tools":
		return Tools(programs...)
	case "sluice":
		return Sluice(programs...)
	case "mitmproxy":
		return Mitmproxy()
	default:
		return Image{}, fmt.Errorf("there is no image %q: there are tools, sluice and mitmproxy", name)
	}
}

// Pause is localhost/pause:node, for sandboxes: it sleeps.
func Pause() (Image, error) {
	t := newTree()
	if err := t.busybox(); err != nil {
		return Image{}, err
	}
	return newImage("localhost/pause:node", t, v1.Config{Entrypoint: []string{"/bin/sleep", "2147483647"}, Env: []string{searchPath}})
}

// Tools is tools:e2e: busybox, and programs that need nothing else.
func Tools(programs ...string) (Image, error) {
	t := newTree()
	if err := t.busybox(); err != nil {
		return Image{}, err
	}
	t.programs(programs)
	return newImage("tools:e2e", t, v1.Config{Cmd: []string{"sh"}, Env: []string{searchPath}})
}

// Sluice is sluice:e2e: sluice and sluiced, of the given paths, on what the project's Dockerfile puts them on.
func Sluice(programs ...string) (Image, error) {
	t := newTree()
	if err := t.packages("iptables", "base-files", "libc-bin"); err != nil {
		return Image{}, err
	}
	if err := t.busybox(); err != nil {
		return Image{}, err
	}
	// What Debian's update-alternatives would link.
	for _, name := range []string{"iptables", "iptables-save", "iptables-restore", "ip6tables", "ip6tables-save", "ip6tables-restore"} {
		t.symlink("/usr/sbin/"+name, "xtables-nft-multi")
	}
	t.programs(programs)
	return newImage("sluice:e2e", t, v1.Config{Entrypoint: []string{"sluiced"}, Cmd: []string{"run"}, Env: []string{searchPath}})
}

// Mitmproxy is mitmproxy:e2e: mitmdump and mitmweb of the machine's package, with all they need.
func Mitmproxy() (Image, error) {
	t := newTree()
	if err := t.packages("mitmproxy"); err != nil {
		return Image{}, err
	}
	if err := t.busybox(); err != nil {
		return Image{}, err
	}
	t.file("/etc/ssl/certs/ca-certificates.crt")
	return newImage("mitmproxy:e2e", t, v1.Config{Cmd: []string{"mitmdump"}, Env: []string{searchPath, "HOME=/root", "LANG=C.UTF-8"}})
}

func (t *tree) programs(paths []string) {
	for _, p := range paths {
		t.program("/usr/local/bin/"+filepath.Base(p), p)
	}
}

// busybox adds busybox, which must be static, as everything that it can be and is not there yet.
func (t *tree) busybox() error {
	source, err := exec.LookPath("busybox")
	if err != nil {
		return fmt.Errorf("images need busybox-static: %w", err)
	}
	program, err := elf.Open(source)
	if err != nil {
		return err
	}
	defer program.Close() //nolint:errcheck // only read
	if program.Section(".interp") != nil {
		return fmt.Errorf("%s is not static: images need busybox-static", source)
	}
	list, err := exec.Command(source, "--list").Output()
	if err != nil {
		return fmt.Errorf("asking busybox what it is: %w", err)
	}
	t.program("/usr/bin/busybox", source)
	for name := range strings.FieldsSeq(string(list)) {
		_, bin := t.entries["/usr/bin/"+name]
		_, sbin := t.entries["/usr/sbin/"+name]
		if !bin && !sbin {
			t.symlink("/usr/bin/"+name, "busybox")
		}
	}
	return nil
}
