package images

import (
	"bytes"
	"reflect"
	"testing"
)

func TestRelations(t *testing.T) {
	t.Parallel()
	got := relations("python3 (>= 3.9~), python3-certifi | ca-certificates, libc6:amd64 (= 2.36-9), mawk")
	want := [][]string{{"python3"}, {"python3-certifi", "ca-certificates"}, {"libc6"}, {"mawk"}}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

// TestPackages packs a small package with its dependencies, twice, with the same result.
func TestPackages(t *testing.T) {
	t.Parallel()
	var archives [2][]byte
	for i := range archives {
		files := newTree()
		if err := files.packages("iptables"); err != nil {
			t.Fatal(err)
		}
		libc := "/usr/lib/" + triplet(t) + "/libc.so.6"
		for _, name := range []string{"/usr/sbin/xtables-nft-multi", libc, "/lib", "/etc/passwd"} {
			if _, ok := files.entries[name]; !ok {
				t.Errorf("%s is missing", name)
			}
		}
		var err error
		if archives[i], err = files.tar(); err != nil {
			t.Fatal(err)
		}
	}
	if !bytes.Equal(archives[0], archives[1]) {
		t.Error("two archives of the same files differ")
	}
}

func TestPackageThatIsNotInstalled(t *testing.T) {
	t.Parallel()
	if err := newTree().packages("no-such-package"); err == nil {
		t.Error("got no error for a package that is not installed")
	}
}

// triplet returns the name of Debian's folder for this architecture's libraries.
func triplet(t *testing.T) string {
	t.Helper()
	name, ok := map[string]string{"amd64": "x86_64-linux-gnu", "arm64": "aarch64-linux-gnu"}[architecture]
	if !ok {
		t.Fatalf("the test does not know the library folder of %s", architecture)
	}
	return name
}
