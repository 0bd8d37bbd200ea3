// Package install puts the plugin onto the node: its binary into the CNI bin directory, and its entry into the network
// configuration that the runtime uses. The node's CNI works at every moment in between, after a crash or with a full
// disk too, because each file is written beside its place and renamed.
package install

import (
	"bytes"
	"crypto/sha256"
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
	"github.com/sluice-cni/sluice/plugin/files"
)

const (
	// copySuffix ends the name of the conflist that the installer makes of the configuration of a single plugin:
	// 10-a-by-sluice.conflist of 10-a.conf. It sorts before that file, so the runtime chooses it. The file of the other
	// program stays as it is: whether that program changes or removes its file can be seen then. Multus does not take
	// files that begin with 00-multus for the network of pods, and so not the copy of its own.
	copySuffix = "-by-sluice.conflist"
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
	if err := i.forgetUninstall(); err != nil {
		return nil, err
	}
	return i.installLocked()
}

// forgetUninstall removes the mark of an earlier uninstallation.
func (i Installer) forgetUninstall() error {
	if err := files.Remove(attach.UninstalledMark(i.StateDir)); err != nil {
		return fmt.Errorf("installing after an uninstall: %w", err)
	}
	return nil
}

// installLocked is Install, for a caller that holds the lock.
func (i Installer) installLocked() (written []string, err error) {
	if err := errors.Join(checkWritable(i.ConfDir), checkWritable(i.BinDir)); err != nil {
		return nil, err
	}
	if err := errors.Join(sweep(i.ConfDir), sweep(i.BinDir)); err != nil {
		return nil, fmt.Errorf("removing temporary files of an interrupted installation: %w", err)
	}
	// The binary comes first: with an entry and without the binary, every ADD on the node would fail.
	if written, err = i.copyPlugin(); err != nil {
		return written, err
	}
	if err := i.removeOrphans(); err != nil {
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
	into, wrote, err := i.enter(primary, text)
	written = append(written, wrote...)
	if err != nil {
		return written, err
	}
	return written, i.clean(into)
}

// enter puts the entry into the network configuration that the runtime chooses, and returns the path of the file that
// has it now:
//
//   - a conflist itself, and that of Multus too: the runtime calls sluice after Multus, with the annotations of the pod
//     (Multus does not pass them on), and whichever network an annotation names in place of the cluster's;
//   - a copy that is a conflist, for the configuration of a single plugin;
//   - the copy of another conflist in the configuration of Multus alone (the thin Multus, for CNI versions other than
//     1.0.0). It takes any other file beside its own for the network of pods, a copy of its own too.
func (i Installer) enter(primary string, text []byte) (into string, written []string, err error) {
	switch {
	case isList(primary):
		written, err = i.edit(primary, func(text []byte) ([]byte, error) { return withEntry(text, i.Entry) })
		return primary, written, err
	case copiesDelegate(text):
		written, err = i.edit(primary, func(text []byte) ([]byte, error) { return withDelegateEntry(text, i.Entry) })
		return primary, written, err
	}
	written, err = i.copy(primary, text)
	return copyOf(primary), written, err
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
	if err := replace(to, data, 0o755, nil); err != nil {
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

// primary returns the file that the runtime would choose without sluice: the first valid one. An invalid file before it
// may be half-written, and then be chosen soon: it is an error, and is skipped when it is older than halfWrittenAge.
func (i Installer) primary() (string, error) {
	files, err := i.confFiles()
	if err != nil {
		return "", fmt.Errorf("listing the CNI network configurations: %w", err)
	}
	for _, f := range files {
		if isCopy(f) {
			continue
		}
		text, err := os.ReadFile(f)
		if err == nil {
			err = validate(f, text)
		}
		switch {
		case err == nil:
			return f, nil
		case errors.Is(err, fs.ErrPermission): // the runtime may be able to read it
			return "", fmt.Errorf("looking for the runtime's network configuration: %w", err)
		}
		// Abs: a file from the future was written before the clock jumped back, and is no reason to wait for so long.
		if info, serr := os.Stat(f); serr == nil && time.Since(info.ModTime()).Abs() < halfWrittenAge {
			return "", fmt.Errorf("%w: %s may be half-written: %w", ErrNoNetwork, f, err)
		}
	}
	return "", fmt.Errorf("%w in %s", ErrNoNetwork, i.ConfDir)
}

// copyOf is the path of the conflist that copy makes of the file conf.
func copyOf(conf string) string { return strings.TrimSuffix(conf, filepath.Ext(conf)) + copySuffix }

func isCopy(path string) bool { return strings.HasSuffix(path, copySuffix) }

// copy makes a conflist with the entry of the configuration of a single plugin. A copy of the same text stays, with the
// entries that others have added to it.
func (i Installer) copy(conf string, text []byte) (written []string, err error) {
	to := copyOf(conf)
	source := fmt.Sprintf("sha256:%x", sha256.Sum256(text))
	if have, err := os.ReadFile(to); err == nil && validate(to, have) == nil {
		var k keys
		if json.Unmarshal(have, &k) == nil && k.Source == source {
			return i.edit(to, func(text []byte) ([]byte, error) { return withEntry(text, i.Entry) })
		}
	}
	list, err := fromConf(text, keys{}, source)
	if err == nil {
		list, err = withEntry(list, i.Entry)
	}
	if err != nil {
		return nil, fmt.Errorf("making a conflist of %s: %w", conf, err)
	}
	return []string{to}, replace(to, list, modeOf(conf), nil)
}

// removeOrphans removes the copies of files that their owners have removed. The runtime would choose such a copy, and
// call plugins that are gone.
func (i Installer) removeOrphans() error {
	files, err := i.confFiles()
	errs := []error{err}
	for _, f := range files {
		if isCopy(f) && !slices.ContainsFunc(files, func(of string) bool { return !isList(of) && copyOf(of) == f }) {
			errs = append(errs, remove(f))
		}
	}
	return errors.Join(errs...)
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
	if err := replace(path, after, modeOf(path), text); err != nil {
		return nil, err
	}
	return []string{path}, nil
}

// clean removes the entry from every file except keep, so that files that the runtime does not use are as their owner
// left them. It removes copies, unless another file names one: Multus may have found the copy beside its original, and
// taken it for the network of pods.
func (i Installer) clean(keep string) error {
	files, err := i.confFiles()
	errs := []error{err}
	for _, f := range files {
		if f == keep {
			continue
		}
		if isCopy(f) && !isNamed(f, files) {
			errs = append(errs, remove(f))
			continue
		}
		text, err := os.ReadFile(f)
		if err != nil || validate(f, text) != nil {
			continue // not a valid configuration, so it has no entry of sluice
		}
		_, err = i.edit(f, withoutEntry)
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// isNamed tells whether one of files has the name of the file at path in it.
func isNamed(path string, files []string) bool {
	return slices.ContainsFunc(files, func(f string) bool {
		text, err := os.ReadFile(f)
		return err == nil && bytes.Contains(text, []byte(filepath.Base(path)))
	})
}

// Uninstall removes the entry and the copies that have it, also if it cannot mark the node as uninstalled. It removes
// the binary only if that has succeeded and there are no attachment records, because the DEL of these pods needs it. It
// returns their number.
func (i Installer) Uninstall() (attachments int, err error) {
	unlock, err := lock(i.StateDir)
	if err != nil {
		return 0, err
	}
	defer unlock()
	var errs []error
	if err := os.WriteFile(attach.UninstalledMark(i.StateDir), nil, 0o600); err != nil {
		errs = append(errs, fmt.Errorf("writing the file that keeps the daemon from installing again: %w", err))
	}
	if err := errors.Join(sweep(i.ConfDir), sweep(i.BinDir)); err != nil {
		errs = append(errs, fmt.Errorf("removing temporary files of an interrupted installation: %w", err))
	}
	if err := i.clean(""); err != nil {
		return 0, errors.Join(append(errs, err)...)
	}
	records, err := attach.NewStore(i.StateDir).List()
	if err == nil && len(records) == 0 {
		err = i.removePlugin()
	}
	return len(records), errors.Join(append(errs, err)...)
}

// RemovePlugin removes the binary after Uninstall, when the attachments have gone. It does nothing if another daemon
// has installed the plugin again meanwhile, or the binary is needed still.
func (i Installer) RemovePlugin() error {
	unlock, err := lock(i.StateDir)
	if err != nil {
		return err
	}
	defer unlock()
	records, err := attach.NewStore(i.StateDir).List()
	if err != nil || len(records) > 0 || !attach.Uninstalled(i.StateDir) {
		return err
	}
	return i.removePlugin()
}

func (i Installer) removePlugin() error { return remove(filepath.Join(i.BinDir, pluginType)) }
