// Package install puts the plugin onto the node: its binary into the CNI bin directory, and its entry into the network
// configuration that the runtime uses. The node's CNI works at every moment in between, after a crash or with a full
// disk too, because each file is written beside its place and renamed.
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
	// savedSuffix is appended to the name of a .conf that was converted to a .conflist. No runtime loads this
	// extension.
	savedSuffix = ".sluice-saved"
	// halfWrittenAge is the age up to which an invalid file may be half-written. An older one is taken for broken.
	halfWrittenAge = 2 * time.Second
)

// ErrNoNetwork means that the node has no valid network configuration yet, or that one is being written. The caller can
// try again later.
var ErrNoNetwork = errors.New("no valid CNI network configuration yet")

// Installer installs and uninstalls the plugin.
type Installer struct {
	// ConfDir and BinDir are the directories in which the runtime looks for network configurations and for plugins.
	ConfDir, BinDir string
	// Plugin is the path of the binary to copy into BinDir.
	Plugin string
	// Entry is the plugin's entry for the "plugins" of the conflist, in JSON.
	Entry json.RawMessage
	// StateDir is the directory of the attachment records. Installers lock it against each other.
	StateDir string
}

// Install installs the plugin, and returns the paths of the files that it had to write: none if all is in place. After
// it the network configuration that the runtime chooses has the entry, and no other one has it. The error is
// ErrNoNetwork if there is none to choose. A configuration with a CNI version that the plugin does not serve is an
// error, and stays or becomes as its owner wrote it, without the entry.
func (i Installer) Install() (written []string, err error) {
	unlock, err := lock(i.StateDir)
	if err != nil {
		return nil, err
	}
	defer unlock()
	if err := ignoreMissing(os.Remove(i.uninstalledMark())); err != nil {
		return nil, fmt.Errorf("installing after an uninstall: %w", err)
	}
	return i.installLocked()
}

// installLocked is Install, for a caller that holds the lock.
func (i Installer) installLocked() (written []string, err error) {
	if err := errors.Join(sweep(i.ConfDir), sweep(i.BinDir)); err != nil {
		return nil, fmt.Errorf("removing temporary files of an interrupted installation: %w", err)
	}
	// The binary comes first: with an entry and without the binary, every ADD on the node would fail.
	if written, err = i.copyPlugin(); err != nil {
		return written, err
	}
	primary, err := i.primary()
	if err != nil {
		return written, err
	}
	text, err := os.ReadFile(primary)
	if err != nil {
		return written, err
	}
	if err := checkVersion(text); err != nil {
		// With an entry, as an older sluice or another program may have left one, no pod of the node would start.
		return written, errors.Join(fmt.Errorf("installing into %s: %w", primary, err), i.clean(""))
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

// copyPlugin copies the binary into BinDir, unless the same one is there.
func (i Installer) copyPlugin() (written []string, err error) {
	data, err := os.ReadFile(i.Plugin)
	if err != nil {
		return nil, fmt.Errorf("reading the plugin to install: %w", err)
	}
	to := filepath.Join(i.BinDir, pluginType)
	if info, err := os.Stat(to); err == nil && info.Mode().Perm() == 0o755 && same(to, data) {
		return nil, nil
	}
	if err := replace(to, data, 0o755); err != nil {
		return nil, err
	}
	return []string{to}, nil
}

// isList tells, by the extension as runtimes do, whether a file has a list of plugins or a single one.
func isList(path string) bool { return filepath.Ext(path) == ".conflist" }

// confFiles lists the files from which the runtime chooses, in its order.
func (i Installer) confFiles() ([]string, error) {
	files, err := libcni.ConfFiles(i.ConfDir, []string{".conf", ".conflist", ".json"})
	slices.Sort(files)
	return files, err
}

// primary returns the file that the runtime chooses: the first valid one. An invalid file before it may be
// half-written, and then be chosen soon: it is skipped when it is older than halfWrittenAge, and an error before.
func (i Installer) primary() (string, error) {
	files, err := i.confFiles()
	if err != nil {
		return "", fmt.Errorf("listing the CNI network configurations: %w", err)
	}
	for _, f := range files {
		text, err := os.ReadFile(f)
		if err == nil {
			err = validate(f, text)
		}
		if err == nil {
			return f, nil
		}
		// Abs: a file from the future was written before the clock jumped back, and is no reason to wait for so long.
		if info, serr := os.Stat(f); serr == nil && time.Since(info.ModTime()).Abs() < halfWrittenAge {
			return "", fmt.Errorf("%w: %s may be half-written: %w", ErrNoNetwork, f, err)
		}
	}
	return "", fmt.Errorf("%w in %s", ErrNoNetwork, i.ConfDir)
}

// convert replaces the configuration of a single plugin by a conflist with the entry, and saves the old file. While
// both are there the runtime chooses the old one, which sorts first and works without sluice.
func (i Installer) convert(conf string) (list string, err error) {
	list = listOf(conf)
	text, err := os.ReadFile(conf)
	if err != nil {
		return "", err
	}
	data, err := fromConf(text)
	if err != nil {
		return "", fmt.Errorf("converting %s to a conflist: %w", conf, err)
	}
	if data, err = withEntry(data, i.Entry); err != nil {
		return "", fmt.Errorf("converting %s to a conflist: %w", conf, err)
	}
	if have, err := os.ReadFile(list); err == nil && !convertedFrom(have, text) {
		return "", fmt.Errorf("cannot convert %s to %s: another file has that name", conf, list)
	}
	if err := replace(list, data, modeOf(conf)); err != nil {
		return "", err
	}
	if err := move(conf, conf+savedSuffix); err != nil {
		return "", fmt.Errorf("saving the converted file: %w", err)
	}
	return list, nil
}

// convertedFrom tells whether list is the conflist that convert makes of conf, with sluice's entry or without it.
func convertedFrom(list, conf []byte) bool {
	bare, err := withoutEntry(list)
	if err != nil {
		return false
	}
	want, err := fromConf(conf)
	return err == nil && bytes.Equal(bare, want)
}

// modeOf is the mode of the file at path, or 0644 if there is none.
func modeOf(path string) fs.FileMode {
	if info, err := os.Stat(path); err == nil {
		return info.Mode().Perm()
	}
	return 0o644
}

// edit replaces the conflist at path by the result of change, if that differs.
func (i Installer) edit(path string, change func([]byte) ([]byte, error)) (written []string, err error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	after, err := change(text)
	if err != nil {
		return nil, fmt.Errorf("editing %s: %w", path, err)
	}
	if bytes.Equal(text, after) {
		return nil, nil
	}
	if err := replace(path, after, modeOf(path)); err != nil {
		return nil, err
	}
	return []string{path}, nil
}

// clean removes the entry from every conflist except keep, so that files that the runtime does not use are as their
// owner left them.
func (i Installer) clean(keep string) error {
	files, err := i.confFiles()
	errs := []error{err}
	for _, f := range files {
		if f == keep || !isList(f) {
			continue
		}
		text, err := os.ReadFile(f)
		if err != nil || validate(f, text) != nil {
			continue // not a valid conflist, so it has no entry of sluice
		}
		_, err = i.edit(f, withoutEntry)
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// uninstalledMark is the path of a file that tells a running daemon (`run --install`), by existing, not to install
// again. A daemon that starts removes it, and installs.
func (i Installer) uninstalledMark() string { return filepath.Join(i.StateDir, "uninstalled") }

// Uninstall removes the entry, and restores a .conf that was converted to a .conflist. It removes the binary only if
// there are no attachment records, because the DEL of these pods needs it, and returns their number.
func (i Installer) Uninstall() (attachments int, err error) {
	unlock, err := lock(i.StateDir)
	if err != nil {
		return 0, err
	}
	defer unlock()
	if err := os.WriteFile(i.uninstalledMark(), nil, 0o600); err != nil {
		return 0, fmt.Errorf("writing the file that keeps the daemon from installing again: %w", err)
	}
	if err := errors.Join(sweep(i.ConfDir), sweep(i.BinDir)); err != nil {
		return 0, fmt.Errorf("removing temporary files of an interrupted installation: %w", err)
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

// restore puts back every .conf that was converted to a .conflist. It renames the .conf first and removes the .conflist
// then: in between the runtime chooses the .conf, which sorts first.
func (i Installer) restore() error {
	saved, err := filepath.Glob(filepath.Join(i.ConfDir, "*"+savedSuffix))
	errs := []error{err}
	for _, s := range saved {
		errs = append(errs, restoreOne(s))
	}
	files, err := i.confFiles()
	errs = append(errs, err)
	for _, conf := range files {
		if !isList(conf) { // an interrupted restore may have left the conflist beside it
			errs = append(errs, removeConverted(conf))
		}
	}
	return errors.Join(errs...)
}

// removeConverted removes the conflist that convert made of conf.
func removeConverted(conf string) error {
	text, err := os.ReadFile(conf)
	if err != nil {
		return err
	}
	list := listOf(conf)
	have, err := os.ReadFile(list)
	if err != nil || !convertedFrom(have, text) {
		return ignoreMissing(err)
	}
	return remove(list)
}

// listOf is the path of the conflist that convert makes of conf.
func listOf(conf string) string { return strings.TrimSuffix(conf, filepath.Ext(conf)) + ".conflist" }

// restoreOne puts back the .conf that was saved at the path saved, and removes its conflist.
func restoreOne(saved string) error {
	conf := strings.TrimSuffix(saved, savedSuffix)
	list := listOf(conf)
	text, err := os.ReadFile(saved)
	if err != nil {
		return err
	}
	have, err := os.ReadFile(list)
	if err == nil && !convertedFrom(have, text) {
		return nil // another program has changed the conflist since: it stays, and clean removes only the entry
	}
	if err := move(saved, conf); err != nil {
		return fmt.Errorf("restoring %s: %w", conf, err)
	}
	return remove(list)
}
