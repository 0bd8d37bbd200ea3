package nested

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sluice-cni/sluice/plugin/truststore"
)

// maxArguments bounds the arguments that are looked at: a program with more of them counts as an updater.
const maxArguments = 1024

// updateBy returns the update of trust stores that a program of that name makes, by its arguments. variables are those
// of the process, or nil if it is to be asked. One with a hanging file system goes on.
func (e *Engine) updateBy(
	ctx context.Context, c *container, p *process, name string, variables map[string]string,
) update {
	if isUpdater(name) {
		return updateAll
	}
	isKnownWithout := len(c.boundStores()) == 0 && (c.settled.Load() || slices.Contains(editors, name))
	if isKnownWithout || !slices.Contains(byArguments, name) {
		return updateNone
	}
	u, _ := look(ctx, c.pod, func() update {
		u, err := c.updateOf(p, name, variables)
		if err != nil && !p.ended() {
			if count, due := c.pod.lines.Due("arguments"); due {
				e.config.Log.Warn("it is not known whether a program changes a trust store", "uid", c.pod.uid,
					"container", c.name, "err", err, "count", count)
			}
		}
		return u
	}) // none without a look
	return u
}

// updateOf returns the update that a process makes, which runs a program of that name. variables are those of the
// process, or nil if it is to be asked.
func (c *container) updateOf(p *process, name string, variables map[string]string) (update, error) {
	arguments, err := p.arguments()
	if err != nil {
		return updateNone, err
	}
	var writes bool
	switch {
	case slices.Contains(editors, name):
		writes, err = p.touches(c.boundStores(), arguments)
	case name == openssl:
		writes = isRehash(arguments)
	default:
		writes = isInstaller(name, arguments)
	}
	switch {
	case err != nil || !writes:
		return updateNone, err
	case p.isServed(name, arguments, variables, c.machineBundle()):
		return updatePackages, nil
	default:
		return updateAll, nil
	}
}

// touches reports whether an argument of the process leads to one of the stores, or to a folder of one.
func (p *process) touches(stores, arguments []string) (bool, error) {
	cwd, err := p.workingFolder()
	if err != nil {
		return false, err
	}
	var paths []string
	for _, a := range arguments {
		for _, path := range pathsIn(a) {
			if !strings.HasPrefix(path, "/") {
				path = cwd + "/" + path
			}
			paths = append(paths, path)
		}
	}
	if len(paths) > maxArguments {
		return true, nil
	}
	root, err := p.open("root", unix.O_PATH|unix.O_DIRECTORY)
	if err != nil {
		return false, fmt.Errorf("opening the container's root: %w", err)
	}
	defer func() { _ = root.Close() }() // only looked through
	touches, err := truststore.Touches(fmt.Sprintf("/proc/self/fd/%d", root.Fd()), stores, paths)
	if err != nil {
		return false, fmt.Errorf("looking for the trust stores of a program: %w", err)
	}
	return touches, nil
}

// arguments are those of the process, without its name.
func (p *process) arguments() ([]string, error) {
	data, err := p.read("cmdline")
	if err != nil {
		return nil, err
	}
	_, rest, _ := strings.Cut(strings.TrimSuffix(string(data), "\x00"), "\x00")
	return strings.Split(rest, "\x00"), nil
}

// pathsIn are the paths that an argument may have: all of it, or the value of an option.
func pathsIn(argument string) []string {
	if argument == "" {
		return nil
	}
	if !strings.HasPrefix(argument, "-") {
		return []string{argument}
	}
	value := argument[min(2, len(argument)):] // -t/etc/ssl/certs
	if strings.HasPrefix(argument, "--") {
		_, value, _ = strings.Cut(argument, "=") // --target-directory=/etc/ssl/certs
	}
	if !strings.Contains(value, "/") {
		return nil // -rf
	}
	return []string{value}
}

// workingFolder is the path of the process's working directory from its root.
func (p *process) workingFolder() (string, error) {
	root, err := p.link("root")
	if err != nil {
		return "", err
	}
	cwd, err := p.link("cwd")
	if err != nil {
		return "", err
	}
	// Both are paths in the mount namespace of the process, where its root may be a folder.
	below, ok := strings.CutPrefix(cwd, strings.TrimSuffix(root, "/"))
	if !ok || below != "" && below[0] != '/' {
		return "", errors.New("its working directory is not below its root")
	}
	return below, nil
}

// link is the text of a link of the process.
func (p *process) link(name string) (string, error) {
	var text string
	err := p.use(func(dir int) error {
		buffer := make([]byte, unix.PathMax)
		length, err := unix.Readlinkat(dir, name, buffer)
		if err != nil { // the length is -1 then
			return &os.PathError{Op: "readlink", Path: p.dir.Name() + "/" + name, Err: err}
		}
		text = string(buffer[:length])
		return nil
	})
	return text, err
}
