package docs

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-cni/sluice/integration/docs/page"
)

// The runners of console blocks, as the comment before a block names them.
const (
	runNode     = "node"      // in a sandbox, with a proxy
	runNodeLate = "node late" // in a sandbox with a late proxy
	runCluster  = "cluster"   // by the end-to-end tests
	runMake     = "make"      // targets of the Makefile; only their existence is checked
)

// TestRunners: every console block has a runner, and begins with a command.
func TestRunners(t *testing.T) {
	t.Parallel()
	for _, path := range page.All(t) {
		for _, b := range page.Read(t, path).Blocks("console") {
			if !slices.Contains([]string{runNode, runNodeLate, runCluster, runMake}, b.Runner) {
				t.Errorf("%s:%d: the console block has the runner %q; write before it <!-- run: node -->, "+
					"or node late, cluster or make in place of node", path, b.Line, b.Runner)
			}
			if commands, stray := b.Commands(); len(commands) == 0 || len(stray) > 0 {
				t.Errorf("%s:%d: the console block has to begin with a prompt, \"$ \" or \"# \"", path, b.Line)
			}
		}
	}
}

// TestNodeCommands runs the commands of each page in a sandbox of its own, in the order of the page, and compares the
// output that the page shows.
func TestNodeCommands(t *testing.T) {
	t.Parallel()
	for _, path := range page.All(t) {
		var blocks []page.Block
		for _, b := range page.Read(t, path).Blocks("console") {
			if b.Runner == runNode || b.Runner == runNodeLate {
				blocks = append(blocks, b)
			}
		}
		if len(blocks) == 0 {
			continue
		}
		t.Run(filepath.Base(path), func(t *testing.T) {
			t.Parallel()
			s := newSandbox(t)
			for _, b := range blocks {
				s.setProxy(b.Runner == runNode)
				runBlock(t, s, path, b)
			}
		})
	}
}

func runBlock(t *testing.T, s *sandbox, path string, b page.Block) {
	t.Helper()
	commands, _ := b.Commands()
	for _, c := range commands {
		output, err := s.run(c.Text)
		if err != nil {
			t.Fatalf("%s:%d: %s: %v\n%s", path, b.Line, c.Text, err, strings.Join(output, "\n"))
		}
		if len(c.Output) > 0 && !page.Matches(c.Output, output) {
			t.Errorf("%s:%d: %s prints\n%s\nwhere the page has\n%s",
				path, b.Line, c.Text, strings.Join(output, "\n"), strings.Join(c.Output, "\n"))
		}
	}
}

// TestMakeCommands: the targets that pages name exist, and so do the scripts.
func TestMakeCommands(t *testing.T) {
	t.Parallel()
	targets := makeTargets(t)
	for _, path := range page.All(t) {
		for _, b := range page.Read(t, path).Blocks("console") {
			if b.Runner != runMake {
				continue
			}
			commands, _ := b.Commands()
			for _, c := range commands {
				checkMake(t, targets, path, b.Line, c.Text)
			}
		}
	}
}

func checkMake(t *testing.T, targets []string, path string, line int, command string) {
	t.Helper()
	words := strings.Fields(strings.ReplaceAll(command, "\\\n", " "))
	for len(words) > 0 && strings.Contains(words[0], "=") { // an environment variable
		words = words[1:]
	}
	if len(words) == 0 {
		t.Errorf("%s:%d: %q is no command", path, line, command)
		return
	}
	if words[0] != "make" {
		info, err := os.Stat(filepath.Join(page.Root(t), words[0]))
		if err != nil || info.IsDir() || info.Mode()&0o111 == 0 {
			t.Errorf("%s:%d: %q is neither make nor a script of the repository", path, line, command)
		}
		return
	}
	for _, word := range words[1:] {
		if !strings.Contains(word, "=") && !slices.Contains(targets, word) {
			t.Errorf("%s:%d: the Makefile has no target %q", path, line, word)
		}
	}
}

// makeTargets lists the targets of the Makefile from make's data base. `make -n TARGET` would not do: it runs the lines
// that contain $(MAKE), which start a cluster.
func makeTargets(t *testing.T) (targets []string) {
	t.Helper()
	cmd := exec.Command("make", "--no-print-directory", "--no-builtin-rules", "--print-data-base", "--question", "help")
	cmd.Dir = page.Root(t)
	text, err := cmd.Output()
	if len(text) == 0 {
		t.Fatalf("listing the targets of the Makefile: %v", err)
	}
	before := ""
	for line := range strings.Lines(string(text)) {
		name, _, found := strings.Cut(line, ":")
		if found && !strings.ContainsAny(name, " \t#=%$") && before != "# Not a target:" {
			targets = append(targets, name)
		}
		before = strings.TrimSpace(line)
	}
	return targets
}

// TestCheckMake: the check finds a target that does not exist.
func TestCheckMake(t *testing.T) {
	t.Parallel()
	targets := makeTargets(t)
	for _, name := range []string{"build", "test", "e2e", "lint", "help"} {
		if !slices.Contains(targets, name) {
			t.Errorf("make has no target %s: %q", name, targets)
		}
	}
	if slices.Contains(targets, "no-such-target") {
		t.Error("make has a target no-such-target")
	}
}
