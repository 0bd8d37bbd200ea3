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

// keepChained is the advice about programs without a known setting.
const keepChained = "configure it to keep chained plugins"

// owners are the programs that are known. Cilium comes first: it also copies the plugins of others into its file.
var owners = []owner{
	{
		"cilium-cni", "Cilium",
		`set cni.exclusive=false in the values of its chart (cni-exclusive: "false" in its ConfigMap cilium-config)`,
	},
	{"multus", "Multus", keepChained},
	{"multus-shim", "Multus", keepChained},
	{"calico", "Calico", keepChained},
	{"flannel", "flannel", keepChained},
	{"aws-cni", "the Amazon VPC CNI", keepChained},
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
	return fmt.Sprintf("%s, which has the plugins %s: find the owner of that file, and %s",
		what, strings.Join(types, ", "), keepChained)
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
