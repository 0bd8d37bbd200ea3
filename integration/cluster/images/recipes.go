package images

import (
	"debug/elf"
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"
)

const architecture = runtime.GOARCH

const searchPath = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// Named builds the image with the given name: tools, sluice or mitmproxy. paths are those of programs that the image
// tools or sluice is to contain, or that of the one installed mitmproxy.
func Named(name string, paths []string) (Image, error) {
	switch {
	case name == "tools":
		return Tools(paths...)
	case name == "sluice":
		return Sluice(paths...)
	case name == "mitmproxy" && len(paths) == 1:
		return Mitmproxy(paths[0])
	case name == "mitmproxy":
		return Image{}, errors.New("name the folder of the mitmproxy for the image, such as bin/mitmproxy/12.3.1")
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

// Tools builds tools:e2e with busybox, Debian's trust store and the given static programs.
func Tools(programs ...string) (Image, error) {
	t := newTree()
	if err := t.busybox(); err != nil {
		return Image{}, err
	}
	t.file("/etc/ssl/certs/ca-certificates.crt")
	t.programs(programs)
	return newImage("tools:e2e", t, v1.Config{Cmd: []string{"sh"}, Env: []string{searchPath}})
}

// Sluice builds sluice:e2e with the given programs, sluice and sluiced, and with the packages that the project's
// Dockerfile installs.
func Sluice(programs ...string) (Image, error) {
	t := newTree()
	if err := t.iptables("base-files", "libc-bin"); err != nil {
		return Image{}, err
	}
	t.file("/etc/ssl/certs/ca-certificates.crt")
	t.programs(programs)
	return newImage("sluice:e2e", t, v1.Config{
		Entrypoint: []string{"sluiced"}, Cmd: []string{"run"}, Env: []string{searchPath},
	})
}

// Mitmproxy builds mitmproxy:e2e with mitmdump and mitmweb of a version that integration/mitmproxy.sh has installed
// into dir, and with the Python of the Debian 13 beside it. It has the user of the official image, mitmproxy.
func Mitmproxy(dir string) (Image, error) {
	t := newTree()
	debian := filepath.Join(filepath.Dir(dir), "debian13")
	err := t.matching(debian, "usr/lib64", "usr/lib/*-linux-gnu", "usr/lib/python3*", "usr/bin/python3*")
	if err != nil {
		return Image{}, err
	}
	const home = "/opt/mitmproxy"
	t.below(filepath.Join(dir, "venv", "lib"), home+"/lib")
	t.text(home+"/pyvenv.cfg", "home = /usr/bin\ninclude-system-site-packages = false\n")
	t.symlink(home+"/bin/python", "/usr/bin/python3")
	for _, name := range []string{"mitmdump", "mitmweb"} {
		t.script("/usr/local/bin/"+name, "#!"+home+"/bin/python\nimport sys\n"+
			"from mitmproxy.tools import main\nsys.exit(main."+name+"())\n")
	}
	if err := t.busybox(); err != nil {
		return Image{}, err
	}
	t.user("mitmproxy", 1000)
	t.file("/etc/ssl/certs/ca-certificates.crt")
	return newImage("mitmproxy:e2e", t, v1.Config{
		Cmd: []string{"mitmdump"}, Env: []string{searchPath, "LANG=C.UTF-8"},
	})
}

// iptables adds iptables, other packages and busybox.
func (t *tree) iptables(packages ...string) error {
	if err := t.packages(append(packages, "iptables")...); err != nil {
		return err
	}
	// Debian's update-alternatives creates these links when a package is configured.
	for _, name := range []string{"iptables", "ip6tables"} {
		for _, suffix := range []string{"", "-save", "-restore"} {
			t.symlink("/usr/sbin/"+name+suffix, "xtables-nft-multi")
		}
	}
	return t.busybox()
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
