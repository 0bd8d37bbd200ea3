package nested

import (
	"slices"
	"strings"
	"testing"
)

// TestIsInstaller: pip by its own name or as an argument of Python, when it installs or removes packages.
func TestIsInstaller(t *testing.T) {
	t.Parallel()
	for command, want := range map[string]bool{
		"pip install certifi":                          true,
		"pip3.13 /usr/bin/pip3.13 install certifi":     true, // a script
		"pip --quiet uninstall -y certifi":             true,
		"pip download certifi":                         false,
		"pip":                                          false,
		"python3 -m pip install certifi":               true,
		"python3.12 -I -m pip uninstall certifi":       true,
		"python -mpip install certifi":                 true,
		"python /opt/venv/bin/pip3.13 install certifi": true,
		"python3 pip.pyz install certifi":              true,
		"python3 /tmp/get-pip.py":                      true,
		"python3 -m ensurepip --upgrade":               true,
		"python3 -m pip list":                          false,
		"python3 setup.py install":                     false,
		"python3 -c import":                            false,
		"ruby -m pip install certifi":                  false,
		"uv sync":                                      true,
	} {
		name, arguments, _ := strings.Cut(command, " ")
		if got := slices.Contains(byArguments, name) && isInstaller(name, strings.Fields(arguments)); got != want {
			t.Errorf("%s: got %t, want %t", command, got, want)
		}
	}
}

// TestUpdaterNames: the kernel keeps the beginning of a name alone.
func TestUpdaterNames(t *testing.T) {
	t.Parallel()
	for name, want := range map[string]bool{
		"update-ca-certi": true, "update-ca-trust": true, "dpkg": true, "keytool": true, "dpk": false, "": false,
		"pip": false,
	} {
		if got := isUpdater(name); got != want {
			t.Errorf("%q: got %t, want %t", name, got, want)
		}
	}
}
