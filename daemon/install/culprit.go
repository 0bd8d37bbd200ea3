package install

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// owner is a program that writes network configurations with a plugin of its own.
type owner struct{ plugin, program, advice string }

// owners are the programs that are known. Cilium comes first: it also copies the plugins of others into its file. Most
// of the others write their file once, when they start, and have no setting by which it keeps foreign plugins.
var owners = []owner{
	{
		"cilium-cni", "Cilium",
		`set cni.exclusive=false in the values of its chart (cni-exclusive: "false" in its ConfigMap cilium-config)`,
	},
	{"multus", "Multus", followsDelegate},
	{"multus-shim", "Multus", followsDelegate},
	{"calico", "Calico", writesOnce("its pod calico-node starts (the init container install-cni)")},
	{"flannel", "flannel", writesOnce("its pod starts (the init container install-cni), or the agent of k3s")},
	{"aws-cni", "the Amazon VPC CNI", writesOnce("its pod aws-node starts")},
}

// followsDelegate is the advice about Multus 4, thick and thin.
const followsDelegate = "with the configuration file auto, it writes its file again whenever that of the network to " +
	"which it delegates changes, so find out why that one changes all the time; with a file of your own " +
	"(multusConfigFile in the thick daemon's daemon-config.json, --multus-conf-file of the thin one) it writes only " +
	"when it starts"

// writesOnce is the advice about a program that writes its file only when when.
func writesOnce(when string) string {
	return fmt.Sprintf("it has no setting to keep chained plugins, and writes its file only when %s, so find out why "+
		"that happens again and again, or which other program changes the file", when)
}

// ciliumSuffix is appended to the name of a file that Cilium has renamed because cni.exclusive is true.
const ciliumSuffix = ".cilium_bak"

// culprit describes the program that keeps undoing the installation of the file at path, as far as files tell: the
// kernel does not tell the process that wrote a file to a daemon with a process ID namespace of its own.
func (i Installer) culprit(path string) string {
	what := fmt.Sprintf("another program keeps undoing the plugin's entry in %s", path)
	if filepath.Dir(path) == filepath.Clean(i.BinDir) {
		return fmt.Sprintf("another program keeps changing or removing %s; find it, and keep it from that", path)
	}
	renamed, _ := filepath.Glob(filepath.Join(i.ConfDir, "*"+ciliumSuffix)) // the pattern is valid
	types := pluginTypes(path)
	for _, o := range owners {
		if slices.Contains(types, o.plugin) {
			return fmt.Sprintf("%s: most likely %s, whose plugin %s is in it; %s", what, o.program, o.plugin, o.advice)
		}
		if o.program == "Cilium" && len(renamed) > 0 {
			return fmt.Sprintf("%s: most likely %s, which has renamed a file to %s; %s",
				what, o.program, filepath.Base(renamed[0]), o.advice)
		}
	}
	return fmt.Sprintf("%s, which has the plugins %s: find the owner of that file, and keep it from removing the "+
		"plugins of others", what, strings.Join(types, ", "))
}

// pluginTypes are the types of the plugins in the configuration at path, without sluice's.
func pluginTypes(path string) (types []string) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil
	}
	var c struct {
		Type    string
		Plugins []struct{ Type string }
	}
	if json.Unmarshal(text, &c) != nil {
		return nil
	}
	for _, p := range c.Plugins {
		types = append(types, p.Type)
	}
	return slices.DeleteFunc(append(types, c.Type), func(t string) bool { return t == "" || t == pluginType })
}
