package nested

import (
	"fmt"
	"path"
	"slices"
	"strings"
)

// update is the part of the stores of a container that a program may write.
type update int

const (
	updateNone update = iota
	// updatePackages: those in Python packages. The program trusts the CA by a variable meanwhile.
	updatePackages
	updateAll
)

// updaters are the names of programs that write trust stores. Those of Conda replace certifi's, too.
var updaters = []string{
	"update-ca-certificates", "update-ca-trust", "trust", "c_rehash", "keytool",
	"dpkg", "apk", "rpm", "rpmdb", "dnf", "dnf-3", "dnf5", "yum", "microdnf", "zypper", "pacman",
	"conda", "mamba", "micromamba", "pdm",
}

// editors are the names of programs that change the files which their arguments name. They are updaters where an
// argument leads to a store.
var editors = []string{"rm", "mv", "cp", "ln", "sed", "install", "tee", "chmod", "chown", "truncate"}

// openssl is an updater as `openssl rehash`, which makes the hashed names of a folder.
const openssl = "openssl"

func isRehash(arguments []string) bool { return len(arguments) > 0 && arguments[0] == "rehash" }

// packagers are the names of programs that install Python packages with any arguments.
var packagers = []string{"uv", "uvx", "poetry", "pipenv"}

// pips and pythons are the names of programs that may install Python packages, of which certifi and pip itself bring a
// store along. Each is an updater then.
var pips, pythons = versions("pip"), versions("python")

// byArguments are the names of programs that may write stores, by their arguments.
var byArguments = slices.Concat(editors, packagers, pips, pythons, []string{openssl})

// versions are the names that a program of Python has.
func versions(name string) []string {
	names := []string{name, name + "3"}
	for minor := 6; minor < 20; minor++ {
		names = append(names, fmt.Sprintf("%s3.%d", name, minor))
	}
	return names
}

// isInstaller reports whether a program of that name installs or removes Python packages, by its arguments. Those of a
// script begin with its path.
func isInstaller(name string, arguments []string) bool {
	installs := slices.Contains(arguments, "install") || slices.Contains(arguments, "uninstall")
	switch {
	case slices.Contains(packagers, name):
		return true
	case slices.Contains(pips, name):
		return installs
	}
	for _, a := range arguments {
		switch base, _, _ := strings.Cut(path.Base(strings.TrimPrefix(a, "-m")), "."); base { // pip3.13, get-pip.py
		case "get-pip", "ensurepip":
			return true
		case "pip", "pip3":
			if installs {
				return true
			}
		}
	}
	return false
}

// isServed reports whether a process with a program of that name installs Python packages, and trusts the CA by its
// variables while the stores of packages are without. uvx, `uv run` and the like run other programs meanwhile, which
// may need these stores. variables are nil if the process is to be asked.
func (p *process) isServed(name string, arguments []string, variables map[string]string, bundle string) bool {
	if name != "uv" || bundle == "" || slices.Contains(arguments, "run") {
		return false
	}
	if variables == nil {
		variables = p.environment()
	}
	return variables[bundleVariable] == bundle
}

// isUpdater reports whether a program of that name, as the kernel keeps it, writes stores with any arguments.
func isUpdater(name string) bool {
	return slices.ContainsFunc(updaters, func(u string) bool { return u[:min(len(u), maxName)] == name })
}

// maxName is how much of the name of a program the kernel keeps (TASK_COMM_LEN).
const maxName = 15
