package testbed

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"sync"

	"golang.org/x/sys/unix"
)

// programs are the binaries of a testbed, by name, and their packages.
var programs = map[string]string{
	"sluice": "./plugin", "sluiced": "./daemon", "connectproxy": "./integration/connectproxy",
}

// binariesVariable is an environment variable. It names a folder of binaries, to be used in place of those that
// Binaries builds.
const binariesVariable = "SLUICE_TEST_BINARIES"

// Binaries returns the folder of the binaries under test: the daemon is built with the race detector.
func Binaries(tb TB) string {
	tb.Helper()
	if dir := os.Getenv(binariesVariable); dir != "" {
		return dir
	}
	dir, err := buildOnce()
	if err != nil {
		tb.Fatalf("binaries under test: %v", err)
	}
	return dir
}

var buildOnce = sync.OnceValues(func() (string, error) { return Build(true) })

// Build builds the binaries and returns their folder. With race the daemon has the race detector; the plugin has one
// goroutine and runs once, so it is built without.
func Build(race bool) (dir string, err error) {
	folder := "plain"
	if race {
		folder = "race"
	}
	return build(folder, programs, func(name string, cmd *exec.Cmd) {
		if race && name == "sluiced" {
			cmd.Args = append(cmd.Args, "-race")
		}
	})
}

// BuildReleased builds the binaries as they are released and returns their folder.
func BuildReleased() (dir string, err error) {
	return build("release", programs, func(_ string, cmd *exec.Cmd) {
		cmd.Args = append(cmd.Args, "-trimpath", "-ldflags", "-s -w")
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	})
}

// Static builds a program of this repository that runs in any container, and returns its path. pkg is the folder of its
// package: "./integration/clients/try".
func Static(tb TB, pkg string) string {
	tb.Helper()
	name := filepath.Base(pkg)
	dir, err := build("static", map[string]string{name: pkg}, func(_ string, cmd *exec.Cmd) {
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	})
	if err != nil {
		tb.Fatalf("a program for containers: %v", err)
	}
	return filepath.Join(dir, name)
}

// Tool is the path of a development tool, which the Makefile builds into bin/tools.
func Tool(tb TB, name string) string {
	tb.Helper()
	root, err := moduleRoot()
	path := filepath.Join(root, "bin", "tools", name)
	if err == nil {
		_, err = os.Stat(path)
	}
	if err != nil {
		tb.Fatalf("make bin/tools/%s builds this tool: %v", name, err)
	}
	return path
}

// build builds programs, by name, into bin/testing/<folder>, which all packages and runs share: a build that is up to
// date takes moments. Test binaries that run at the same time build one after the other, by a file lock. Nothing
// disturbs a program that runs from there: go build removes a binary before it writes it anew.
func build(folder string, programs map[string]string, adjust func(name string, cmd *exec.Cmd)) (dir string, err error) {
	root, err := moduleRoot()
	if err != nil {
		return "", err
	}
	if err := readSources(root); err != nil {
		return "", fmt.Errorf("reading the sources of the binaries: %w", err)
	}
	dir = filepath.Join(root, "bin", "testing", folder)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	unlock, err := lock(filepath.Join(dir, ".lock"))
	if err != nil {
		return "", err
	}
	defer unlock()
	for name, pkg := range programs {
		// VCS stamps would make a new binary of the same source after each commit.
		cmd := exec.Command("go", "build", "-buildvcs=false", "-o", filepath.Join(dir, name))
		adjust(name, cmd)
		cmd.Args = append(cmd.Args, pkg)
		cmd.Dir = root
		if out, err := cmd.CombinedOutput(); err != nil {
			return "", fmt.Errorf("building %s: %w\n%s", name, err, out)
		}
	}
	return dir, nil
}

// lock waits for the lock on a file. The kernel gives it back when the process ends.
func lock(path string) (unlock func(), err error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o644)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX); err != nil {
		return nil, errors.Join(fmt.Errorf("locking %s: %w", path, err), f.Close())
	}
	return func() { _ = f.Close() }, nil // closing unlocks
}

// readSources opens the folders that the binaries are made of. `go test` caches a result by the files and folders that
// the test opens: a change of the daemon must run the tests again that start its binary and import nothing of it.
func readSources(root string) error {
	for _, dir := range []string{"plugin", "daemon", "integration/connectproxy"} {
		err := filepath.WalkDir(filepath.Join(root, dir), func(_ string, _ fs.DirEntry, err error) error { return err })
		if err != nil {
			return err
		}
	}
	return nil
}

// moduleRoot is the folder of go.mod, above the working directory. It is found without the go command, which is missing
// where a compiled test runs elsewhere.
var moduleRoot = sync.OnceValues(func() (string, error) {
	here, err := os.Getwd()
	if err != nil {
		return "", fmt.Errorf("finding the module: %w", err)
	}
	for root := here; ; root = filepath.Dir(root) {
		if _, err := os.Stat(filepath.Join(root, "go.mod")); err == nil {
			return root, nil
		}
		if root == "/" {
			return "", fmt.Errorf("finding the module: no folder above %s has a go.mod", here)
		}
	}
})

// SourceFile is the absolute path of a file of this repository. `go test` runs a test again that has asked for it when
// the file has changed.
func SourceFile(tb TB, path string) string {
	tb.Helper()
	root, err := moduleRoot()
	if err != nil {
		tb.Fatalf("%v", err)
	}
	file := filepath.Join(root, path)
	if _, err := os.Stat(file); err != nil { // go test notes this call
		tb.Fatalf("%v", err)
	}
	return file
}
