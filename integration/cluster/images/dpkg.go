package images

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

const dpkgDir = "/var/lib/dpkg"

// unneeded are packages that are only needed to install and configure other packages.
var unneeded = []string{"debconf", "dpkg", "init-system-helpers", "perl-base", "tar"}

// unshipped matches files that no program reads.
var unshipped = regexp.MustCompile(
	`^/usr/(share/(doc|man|info|lintian|bug|locale|icons|applications|pixmaps)|include)(/|$)|^/\.$`)

// pkg is an installed package in dpkg's status file.
type pkg struct {
	name, arch string
	depends    [][]string // each element lists alternatives
}

// packages adds the files of packages and, recursively, of their dependencies.
func (t *tree) packages(roots ...string) error {
	installed, err := installedPackages()
	if err != nil {
		return err
	}
	seen := map[string]bool{}
	for _, name := range unneeded {
		seen[name] = true
	}
	for todo := roots; len(todo) > 0; todo = todo[1:] {
		p, ok := installed[todo[0]]
		if !ok {
			return fmt.Errorf("the package %s is not installed (integration/setup.sh e2e installs it)", todo[0])
		}
		if seen[p.name] {
			continue
		}
		seen[p.name] = true
		if err := t.packageFiles(p); err != nil {
			return fmt.Errorf("adding the files of the package %s: %w", p.name, err)
		}
		for _, alternatives := range p.depends {
			i := slices.IndexFunc(alternatives, func(name string) bool { _, ok := installed[name]; return ok })
			if i >= 0 {
				todo = append(todo, alternatives[i])
			}
		}
	}
	return nil
}

// packageFiles adds the files of a package, and the bytecode that Python has compiled from them.
func (t *tree) packageFiles(p pkg) error {
	list, err := os.ReadFile(filepath.Join(dpkgDir, "info", p.name+".list"))
	if os.IsNotExist(err) {
		list, err = os.ReadFile(filepath.Join(dpkgDir, "info", p.name+":"+p.arch+".list"))
	}
	if err != nil {
		return err
	}
	for name := range strings.FieldsFuncSeq(string(list), func(r rune) bool { return r == '\n' }) {
		if unshipped.MatchString(name) {
			continue
		}
		if _, err := os.Lstat(name); err != nil {
			continue // the administrator has removed the file, such as a conffile or documentation
		}
		t.file(name)
		if dir, base := filepath.Split(name); strings.HasSuffix(base, ".py") {
			pattern := strings.TrimSuffix(base, ".py") + ".cpython-*.pyc"
			compiled, err := filepath.Glob(filepath.Join(dir, "__pycache__", pattern))
			if err != nil {
				return err
			}
			for _, c := range compiled {
				t.file(c)
			}
		}
	}
	return nil
}

var packageName = regexp.MustCompile(`^[a-z0-9][a-z0-9+.-]*`)

// installedPackages returns the machine's packages by name, real or virtual.
func installedPackages() (map[string]pkg, error) {
	status, err := os.ReadFile(filepath.Join(dpkgDir, "status"))
	if err != nil {
		return nil, fmt.Errorf("reading the installed Debian packages, which images are built from: %w", err)
	}
	installed := map[string]pkg{}
	provided := map[string]pkg{}
	for stanza := range strings.SplitSeq(string(status), "\n\n") {
		var p pkg
		var provides [][]string
		ok := false
		for line := range strings.Lines(stanza) {
			key, value, _ := strings.Cut(strings.TrimSuffix(line, "\n"), ": ")
			switch key {
			case "Package":
				p.name = value
			case "Architecture":
				p.arch = value
			case "Status":
				ok = strings.HasSuffix(value, " installed")
			case "Depends", "Pre-Depends":
				p.depends = append(p.depends, relations(value)...)
			case "Provides":
				provides = relations(value)
			}
		}
		if !ok {
			continue
		}
		installed[p.name] = p
		for _, names := range provides {
			provided[names[0]] = p
		}
	}
	for name, p := range provided {
		if _, ok := installed[name]; !ok {
			installed[name] = p
		}
	}
	return installed, nil
}

// relations returns the package names in a field such as "libc6 (>= 2.34), python3 | python3:any".
func relations(value string) [][]string {
	var all [][]string
	for one := range strings.SplitSeq(value, ",") {
		var names []string
		for alternative := range strings.SplitSeq(one, "|") {
			if name := packageName.FindString(strings.TrimSpace(alternative)); name != "" {
				names = append(names, name)
			}
		}
		if names != nil {
			all = append(all, names)
		}
	}
	return all
}
