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

// Named builds the image with the given name: tools, sluice or mitmproxy. programs are paths of programs that the image
// tools or sluice is to contain.
func Named(name string, programs []string) (Image, error) {
	switch name {
	case "tools":
		return Tools(programs...)
	case "sluice":
		return Sluice(programs...)
	case "mitmproxy":
		return Mitmproxy()
	default:
		return Image{}, fmt.Errorf("unknown image %q: want tools, sluice or mitmproxy", name)
	}
}

// Pause builds localhost/pause:node, the image of sandboxes. Its only process sleeps.
func Pause() (Image, error) {
	t := newTree()
	if err := t.busybox(); err != nil {
		return Image{}, err
	}
	return newImage("localhost/pause:node", t, v1.Config{
		Entrypoint: []string{"/bin/sleep", "2147483647"}, Env: []string{searchPath},
	})
}

// Tools builds tools:e2e with busybox and the given static programs.
func Tools(programs ...string) (Image, error) {
	t := newTree()
	if err := t.busybox(); err != nil {
		return Image{}, err
	}
	t.programs(programs)
	return newImage("tools:e2e", t, v1.Config{Cmd: []string{"sh"}, Env: []string{searchPath}})
}

// Sluice builds sluice:e2e with the given programs, sluice and sluiced, and with the packages that the project's
// Dockerfile installs.
func Sluice(programs ...string) (Image, error) {
	t := newTree()
	if err := t.packages("iptables", "base-files", "libc-bin"); err != nil {
		return Image{}, err
	}
	if err := t.busybox(); err != nil {
		return Image{}, err
	}
	// Debian's update-alternatives creates these links when a package is configured.
	for _, name := range []string{"iptables", "ip6tables"} {
		for _, suffix := range []string{"", "-save", "-restore"} {
			t.symlink("/usr/sbin/"+name+suffix, "xtables-nft-multi")
		}
	}
	t.programs(programs)
	return newImage("sluice:e2e", t, v1.Config{
		Entrypoint: []string{"sluiced"}, Cmd: []string{"run"}, Env: []string{searchPath},
	})
}

// Mitmproxy builds mitmproxy:e2e with mitmdump and mitmweb from the machine's package, and with its dependencies.
func Mitmproxy() (Image, error) {
	t := newTree()
	if err := t.packages("mitmproxy"); err != nil {
		return Image{}, err
	}
	if err := t.busybox(); err != nil {
		return Image{}, err
	}
	t.file("/etc/ssl/certs/ca-certificates.crt")
	return newImage("mitmproxy:e2e", t, v1.Config{
		Cmd: []string{"mitmdump"}, Env: []string{searchPath, "HOME=/root", "LANG=C.UTF-8"},
	})
}

func (t *tree) programs(paths []string) {
	for _, p := range paths {
		t.program("/usr/local/bin/"+filepath.Base(p), p)
	}
}

// busybox adds busybox, which must be linked statically, and a link for each applet that the tree does not contain yet.
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
		return fmt.Errorf("%s is linked dynamically: images need the package busybox-static", source)
	}
	list, err := exec.Command(source, "--list").Output()
	if err != nil {
		return fmt.Errorf("listing the applets of busybox: %w", err)
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
