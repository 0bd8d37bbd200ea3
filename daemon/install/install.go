// Package install puts the plugin onto the node: its binary into the CNI bin directory, its entry into the
// configuration that the runtime uses. Everything that it writes leaves the node's CNI working if it is cut short.
package install

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/containernetworking/cni/libcni"

	"github.com/sluice-cni/sluice/plugin/attach"
)

const (
	// savedSuffix marks a .conf that became a .conflist: no runtime looks at this extension.
	savedSuffix = ".sluice-saved"
	// settling is how old a file is that is not taken for half-written any more.
	settling = 2 * time.Second
)

// ErrNoNetwork means that the node has no network configuration yet, or that it is being written.
var ErrNoNetwork = errors.New("no network configuration to chain to yet")

// Installer is what to install, and where.
type Installer struct {
	ConfDir, BinDir string
	// Plugin is the binary that is copied.
	Plugin string
	// Entry is our entry of the conflist.
	Entry json.RawMessage
	// StateDir has the records of attachments.
	StateDir string
}

// Install brings the node in line, and returns the files that it had to write. After it the runtime's choice of
// network, and no other, has the entry.
func (i Installer) Install() (written []string, err error) {
	unlock, err := lock(i.StateDir)
	if err != nil {
		return nil, err
	}
	defer unlock()
	if err := ignoreMissing(os.Remove(i.uninstalledMark())); err != nil {
		return nil, fmt.Errorf("installing after an uninstall: %w", err)
	}
	return i.install()
}

// install is for who holds the lock.
func (i Installer) install() (written []string, err error) {
	if err := errors.Join(sweep(i.ConfDir), sweep(i.BinDir)); err != nil {
		return nil, fmt.Errorf("removing what an installation left: %w", err)
	}
	// The binary first: an entry without it would fail every pod of the node.
	if written, err = i.copyPlugin(); err != nil {
		return written, err
	}
	primary, err := i.primary()
	if err != nil {
		return written, err
	}
	if !isList(primary) {
		if primary, err = i.convert(primary); err != nil {
			return written, err
		}
		written = append(written, primary)
	}
	wrote, err := i.edit(primary, func(text []byte) ([]byte, error) { return withEntry(text, i.Entry) })
	written = append(written, wrote...)
	if err != nil {
		return written, err
	}
	return written, i.clean(primary)
}

func (i Installer) copyPlugin() (written []string, err error) {
	data, err := os.ReadFile(i.Plugin)
	if err != nil {
		return nil, fmt.Errorf("the plugin to install: %w", err)
	}
	to := filepath.Join(i.BinDir, pluginType)
	if info, err := os.Stat(to); err == nil && info.Mode().Perm() == 0o755 && same(to, data) {
		return nil, nil
	}
	return []string{to}, replace(to, data, 0o755)
}

// isList tells a list of plugins from the configuration of a single one, by its name as runtimes do.
func isList(path string) bool { return filepath.Ext(path) == ".conflist" }

// confFiles are those that the runtime looks at, in its order.
func (i Installer) confFiles() ([]string, error) {
	files, err := libcni.ConfFiles(i.ConfDir, []string{".conf", ".conflist", ".json"})
	slices.Sort(files)
	return files, err
}

// primary is the file that the runtime would choose: the first that is valid. One that is not may be half-written;
// it is passed over when it has been so for a while.
func (i Installer) primary() (string, error) {
	files, err := i.confFiles()
	if err != nil {
		return "", fmt.Errorf("looking for the network configuration: %w", err)
	}
	for _, f := range files {
		text, err := os.ReadFile(f)
		if err == nil {
			err = validate(f, text)
		}
		if err == nil {
			return f, nil
		}
		if info, serr := os.Stat(f); serr == nil && time.Since(info.ModTime()).Abs() < settling { // from the future: before the clock jumped back
			return "", fmt.Errorf("%w: %s may be half-written: %w", ErrNoNetwork, f, err)
		}
	}
	return "", fmt.Errorf("%w in %s", ErrNoNetwork, i.ConfDir)
}

// convert makes a conflist of a single plugin's configuration. While both files are there the runtime chooses the
// old one, which sorts first and works without us.
func (i Installer) convert(conf string) (list string, err error) {
	list = listOf(conf)
	text, err := os.ReadFile(conf)
	if err != nil {
		return "", err
	}
	data, err := fromConf(text)
	if err != nil {
		return "", fmt.Errorf("%s: %w", conf, err)
	}
	if data, err = withEntry(data, i.Entry); err != nil {
		return "", fmt.Errorf("%s: %w", conf, err)
	}
	if have, err := os.ReadFile(list); err == nil && !made(have, text) {
		return "", fmt.Errorf("%s cannot become %s: there is another file of that name", conf, list)
	}
	if err := replace(list, data, modeOf(conf)); err != nil {
		return "", err
	}
	if err := move(conf, conf+savedSuffix); err != nil {
		return "", fmt.Errorf("%s: %w", conf, err)
	}
	return list, nil
}

// made tells whether list is what we make of conf.
func made(list, conf []byte) bool {
	bare, err := withoutEntry(list)
	if err != nil {
		return false
	}
	want, err := fromConf(conf)
	return err == nil && bytes.Equal(bare, want)
}

func modeOf(path string) fs.FileMode {
	if info, err := os.Stat(path); err == nil {
		return info.Mode().Perm()
	}
	return 0o644
}

// edit rewrites a conflist if change changes it.
func (i Installer) edit(path string, change func([]byte) ([]byte, error)) (written []string, err error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	after, err := change(text)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	if bytes.Equal(text, after) {
		return nil, nil
	}
	return []string{path}, replace(path, after, modeOf(path))
}

// clean takes the entry out of every conflist but keep: what the runtime does not use is as its owner left it.
func (i Installer) clean(keep string) error {
	files, err := i.confFiles()
	errs := []error{err}
	for _, f := range files {
		if f == keep || !isList(f) {
			continue
		}
		text, err := os.ReadFile(f)
		if err != nil || validate(f, text) != nil {
			continue // whatever it is, it is not ours
		}
		_, err = i.edit(f, withoutEntry)
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// uninstalledMark is the file in StateDir that tells a daemon that runs with --install to leave it at that. The next
// one that starts does not.
func (i Installer) uninstalledMark() string { return filepath.Join(i.StateDir, "uninstalled") }

// Uninstall takes the entry out and puts back what became a conflist. The binary stays for as long as there are
// records of attachments, whose DEL needs it; it is said how many.
func (i Installer) Uninstall() (attachments int, err error) {
	unlock, err := lock(i.StateDir)
	if err != nil {
		return 0, err
	}
	defer unlock()
	if err := os.WriteFile(i.uninstalledMark(), nil, 0o600); err != nil {
		return 0, fmt.Errorf("telling the daemon not to install again: %w", err)
	}
	if err := errors.Join(sweep(i.ConfDir), sweep(i.BinDir)); err != nil {
		return 0, fmt.Errorf("removing what an installation left: %w", err)
	}
	if err := errors.Join(i.restore(), i.clean("")); err != nil {
		return 0, err
	}
	records, err := attach.NewStore(i.StateDir).List()
	if err != nil || len(records) > 0 {
		return len(records), err
	}
	return 0, remove(filepath.Join(i.BinDir, pluginType))
}

// restore puts back every .conf that became a .conflist. It comes back first: then the runtime chooses it, and the
// other can go.
func (i Installer) restore() error {
	saved, err := filepath.Glob(filepath.Join(i.ConfDir, "*"+savedSuffix))
	errs := []error{err}
	for _, s := range saved {
		errs = append(errs, restoreOne(s))
	}
	files, err := i.confFiles()
	errs = append(errs, err)
	for _, conf := range files {
		if !isList(conf) { // what a restoration that was cut short left beside it
			errs = append(errs, removeMade(conf))
		}
	}
	return errors.Join(errs...)
}

func removeMade(conf string) error {
	text, err := os.ReadFile(conf)
	if err != nil {
		return err
	}
	list := listOf(conf)
	have, err := os.ReadFile(list)
	if err != nil || !made(have, text) {
		return ignoreMissing(err)
	}
	return remove(list)
}

// listOf is the conflist that a .conf becomes.
func listOf(conf string) string { return strings.TrimSuffix(conf, filepath.Ext(conf)) + ".conflist" }

func restoreOne(saved string) error {
	conf := strings.TrimSuffix(saved, savedSuffix)
	list := listOf(conf)
	text, err := os.ReadFile(saved)
	if err != nil {
		return err
	}
	have, err := os.ReadFile(list)
	if err == nil && !made(have, text) {
		return nil // somebody has changed it since: theirs is the newer, and only our entry goes
	}
	if err := move(saved, conf); err != nil {
		return fmt.Errorf("putting back %s: %w", conf, err)
	}
	return remove(list)
}
