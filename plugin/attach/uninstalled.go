package attach

import (
	"os"
	"path/filepath"
)

// UninstalledMark is the path of a file under stateDir that says, by existing, that sluice was uninstalled from the
// node. A running daemon does not install again then. The plugin, if something still calls it, lets pods pass for which
// no daemon decides. A daemon that starts removes the file, and installs.
func UninstalledMark(stateDir string) string { return filepath.Join(stateDir, "uninstalled") }

// Uninstalled reports whether sluice was uninstalled from the node.
func Uninstalled(stateDir string) bool {
	_, err := os.Stat(UninstalledMark(stateDir))
	return err == nil
}
