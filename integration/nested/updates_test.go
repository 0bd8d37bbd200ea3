package nested

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-cni/sluice/integration/docs/page"
	"github.com/sluice-cni/sluice/integration/registry"
)

const (
	ownCAs  = "cp /company.crt /usr/local/share/ca-certificates/ && "
	python  = "/opt/venv/bin/python"
	pip     = "/opt/venv/bin/pip "
	offline = " --no-index --find-links /updates "
)

// updates are changes by the programs of a distribution and of Python. Their packages are in /updates.
var updates = []change{
	{name: "update-ca-certificates", script: ownCAs + "update-ca-certificates"},
	{name: "update-ca-certificates --fresh", script: ownCAs + "update-ca-certificates --fresh"},
	{name: "openssl rehash", script: "cp /company.crt /etc/ssl/certs/ && openssl rehash /etc/ssl/certs"},
	{name: "dpkg -i ca-certificates", script: "dpkg -i /updates/*.deb"},
	{name: "apt-get install --reinstall", script: "apt-get install --reinstall -y /updates/*.deb"},
	{name: "dpkg-reconfigure", script: "dpkg-reconfigure -f noninteractive ca-certificates"},
	{name: "keytool -importcert", script: "keytool -importcert -noprompt -cacerts -storepass changeit " +
		"-alias company -file /company.crt"},
	{name: "pip install certifi", script: pip + "install" + offline + "certifi==" + olderCertifi},
	{name: "pip install pip", script: pip + "install" + offline + "pip==" + olderPip},
	{name: "pip uninstall", script: pip + "uninstall -y certifi"},
	{name: "python -m pip install", script: python + " -m pip install" + offline + "certifi==" + olderCertifi},
	{name: "python -m venv", script: "python3 -m venv /new && /new/bin/pip install" + offline + "certifi"},
	{name: "uv pip install", script: "/opt/venv/bin/uv --no-cache pip install --python " + python + offline +
		"certifi==" + olderCertifi},
}

// The versions that integration/images.sh puts into bin/images/updates, older than those of the image.
const (
	olderCertifi = "2025.1.31"
	olderPip     = "25.0"
)

// changing are the files that differ from one time to the next, or have the time in them.
var changing = regexp.MustCompile(`\.pyc$|^var/log/|^var/cache/|^etc/ssl/certs/java/cacerts$|/RECORD$|/uv_cache.json$`)

// TestUpdates: programs that update trust stores end as without sluice, and leave the same files, without a trace of
// the CA: `make nested-table`.
func TestUpdates(t *testing.T) {
	if *tableFile == "" {
		t.Skip("it is for `make nested-table`")
	}
	debian := madeImages(t)[0]
	debian.repository = "updates"
	debian.content.Layers = append(debian.content.Layers, registry.Files(updateFiles(t)))
	newLab(t, inspect()).applyAll(debian, updates, func(c change, got, want ended, found []string) {
		if got.exitCode != "0" || want.exitCode != "0" {
			t.Errorf("%s: got exit code %s, and %s without sluice, want 0", c.name, got.exitCode, want.exitCode)
		}
		if differ := differences(got.files, want.files); len(differ) > 0 {
			t.Errorf("%s: these files differ from those without sluice:\n%s", c.name, strings.Join(differ, "\n"))
		}
		if found != nil {
			t.Errorf("%s: the image has %q", c.name, found)
		}
	})
}

// updateFiles are a company's CA and the packages.
func updateFiles(t *testing.T) map[string][]byte {
	t.Helper()
	files := map[string][]byte{"/company.crt": company}
	packages, err := filepath.Glob(filepath.Join(page.Root(t), "bin/images/updates/*"))
	if err != nil || packages == nil {
		t.Fatalf("integration/images.sh install makes the packages (%v)", err)
	}
	for _, p := range packages {
		if files["/updates/"+filepath.Base(p)], err = os.ReadFile(p); err != nil {
			t.Fatal(err)
		}
	}
	return files
}

// differences are the files that two layers do not have in common.
func differences(a, b map[string]string) (differ []string) {
	for name, content := range a {
		if other, ok := b[name]; !ok || other != content && !changing.MatchString(name) {
			differ = append(differ, name)
		}
	}
	for name := range b {
		if _, ok := a[name]; !ok {
			differ = append(differ, name)
		}
	}
	slices.Sort(differ)
	return differ
}
