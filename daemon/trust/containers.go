package trust

import (
	"cmp"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/containerd/nri/pkg/api"

	"github.com/sluice-cni/sluice/plugin/truststore"
)

// container is a container that runs.
type container struct {
	id, name, sandbox string
	pid               int
	mounted           bool // the fallback
	equipped          bool // with the variables

	state   truststore.State
	note    string
	checked string        // the fingerprints of the CA at the last look
	looked  bool          // there has been one
	busy    chan struct{} // closed when the look that goes on has ended; nil if none does
}

func (t *Trust) newContainer(c *api.Container) *container {
	mounted := mountAt(c, MountPath)
	return &container{
		id: c.GetId(), name: c.GetName(), sandbox: c.GetPodSandboxId(), pid: int(c.GetPid()),
		mounted:  mounted != nil && mounted.GetSource() == t.files.folder(),
		equipped: environment(c)[variables[0].name],
		state:    truststore.Unknown, note: "not looked at yet",
	}
}

// replaceAll takes over the runtime's list of containers, and removes the reports of others.
func (t *Trust) replaceAll(list []*api.Container) {
	now := make(map[string]*container)
	reports := make(map[string]bool)
	for _, c := range list {
		reports[t.files.report(c.GetId())] = true
		switch c.GetState() {
		case api.ContainerState_CONTAINER_RUNNING, api.ContainerState_CONTAINER_PAUSED:
			now[c.GetId()] = t.newContainer(c)
		}
	}
	t.mu.Lock()
	before := t.containers
	for id, c := range before {
		if n := now[id]; n != nil && n.pid == c.pid {
			now[id], c.looked = c, false // a repair that failed is tried again
		}
	}
	t.containers, t.known, t.problem = now, true, ""
	t.mu.Unlock()
	t.removeReports(reports)
	t.checkAll()
	t.settle()
	sandboxes := make(map[string]bool)
	for _, list := range []map[string]*container{before, now} {
		for _, c := range list {
			sandboxes[c.sandbox] = true
		}
	}
	for id := range sandboxes {
		t.changed(id)
	}
}

// removeReports removes all reports but those to be kept.
func (t *Trust) removeReports(keep map[string]bool) {
	entries, err := os.ReadDir(t.files.reports())
	if err != nil {
		t.config.Log.Warn("reports of containers that are gone are not removed", "err", err)
	}
	for _, e := range entries {
		id, isReport := strings.CutSuffix(e.Name(), ".json")
		if isReport && !keep[t.files.report(id)] {
			t.removeReport(id)
		}
	}
}

func (t *Trust) removeReport(id string) {
	if err := os.Remove(t.files.report(id)); err != nil && !os.IsNotExist(err) {
		t.config.Log.Warn("a report is not removed", "container", id, "err", err)
	}
}

// start takes over a container whose process is about to start. The hook has run, so its report decides, or a repair
// begins.
func (t *Trust) start(c *container) {
	t.mu.Lock()
	t.containers[c.id] = c
	current := t.ca
	t.mu.Unlock()
	if !t.config.Wanted(c.sandbox) {
		return
	}
	state, note, ok := t.outcome(c, current)
	t.mu.Lock()
	if ok {
		c.set(state, note, current)
	} else {
		t.checkLocked(c)
	}
	t.mu.Unlock()
	t.changed(c.sandbox)
}

// stop forgets a container.
func (t *Trust) stop(id string) {
	t.mu.Lock()
	c := t.containers[id]
	delete(t.containers, id)
	t.mu.Unlock()
	if c != nil {
		t.changed(c.sandbox)
	}
}

func (c *container) set(state truststore.State, note string, current ca) {
	c.state, c.note, c.checked, c.looked = state, note, current.fingerprints, true
}

// checkAll looks at the containers of all wanted pods.
func (t *Trust) checkAll() {
	t.mu.Lock()
	var sandboxes []string
	for _, c := range t.containers {
		sandboxes = append(sandboxes, c.sandbox)
	}
	t.mu.Unlock()
	slices.Sort(sandboxes)
	t.checkSandboxes(slices.Compact(sandboxes))
}

// checkSandboxes looks at the containers of those sandboxes that are wanted, and returns channels that are closed when
// that is done.
func (t *Trust) checkSandboxes(ids []string) []<-chan struct{} {
	wanted := make(map[string]bool)
	for _, id := range ids {
		wanted[id] = t.config.Wanted(id)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	var done []<-chan struct{}
	for _, c := range t.containers {
		if wanted[c.sandbox] && (c.busy != nil || !c.looked || c.checked != t.ca.fingerprints) {
			done = append(done, t.checkLocked(c))
		}
	}
	return done
}

// checkLocked begins a look at a container, if none goes on, and returns the channel that is closed at its end.
func (t *Trust) checkLocked(c *container) <-chan struct{} {
	if c.busy == nil {
		c.busy = make(chan struct{})
		go t.check(c)
	}
	return c.busy
}

// check looks at a container, and repairs it where necessary, until it is in line with the CA.
func (t *Trust) check(c *container) {
	for done := false; !done; {
		t.mu.Lock()
		current := t.ca
		t.mu.Unlock()
		state, note := t.examine(c, current)
		t.mu.Lock()
		c.set(state, note, current)
		if done = current.fingerprints == t.ca.fingerprints; done {
			close(c.busy)
			c.busy = nil
		}
		runs := t.containers[c.id] == c
		t.mu.Unlock()
		if !runs {
			t.removeReport(c.id) // a repair has written it after the container's end
		}
	}
	t.changed(c.sandbox)
}

// examine returns the state of a container, after a repair if the hook has left no report about the CA.
func (t *Trust) examine(c *container, current ca) (state truststore.State, note string) {
	if state, note, ok := t.outcome(c, current); ok {
		return state, note
	}
	if err := t.repair(c); err != nil {
		t.config.Log.Warn("a container is not repaired", "container", c.id, "name", c.name, "err", err)
		return truststore.Unknown, err.Error()
	}
	if state, note, ok := t.outcome(c, current); ok {
		return state, note
	}
	report, err := readReport(t.files.report(c.id))
	if err != nil {
		return truststore.Unknown, err.Error()
	}
	return truststore.Unknown, cmp.Or(report.Error, "the proxy's CA has changed meanwhile")
}

// outcome returns the state of a container by the report of it. It is not ok if a repair may lead to a better one.
func (t *Trust) outcome(c *container, current ca) (state truststore.State, note string, ok bool) {
	if !current.exists() {
		return truststore.Unknown, current.problem, true
	}
	report, err := readReport(t.files.report(c.id))
	if err != nil || report.Error != "" || joined(report.CA) != current.fingerprints {
		return truststore.Unknown, "", false
	}
	note = noteOf(report)
	if note == "" && !c.equipped {
		note = "created without sluice: Node.js and Deno with their own roots do not trust the CA until the container " +
			"starts anew"
	}
	return report.State, note, true
}

// maxNotes bounds the stores that a note names.
const maxNotes = 3

// noteOf names the stores that have failed.
func noteOf(report truststore.Report) string {
	var notes []string
	for _, s := range report.Stores {
		if s.Action == truststore.Failed && s.Kind != truststore.Anchor {
			notes = append(notes, fmt.Sprintf("%s %s: %s", s.Kind, s.Path, s.Error))
		}
	}
	if len(notes) == 0 && report.State != truststore.Trusted {
		return "it has no trust store, and was created without sluice: start it anew"
	}
	if more := len(notes) - maxNotes; more > 0 {
		notes = append(notes[:maxNotes], fmt.Sprintf("and %d more", more))
	}
	return strings.Join(notes, "; ")
}

// podLocked is the state of a pod's containers.
func (t *Trust) podLocked(sandboxID string) Pod {
	var pod Pod
	for _, c := range t.containers {
		if c.sandbox == sandboxID {
			pod.Containers = append(pod.Containers, Container{ID: c.id, Name: c.name, State: c.state, Note: c.note})
		}
	}
	slices.SortFunc(pod.Containers, func(a, b Container) int {
		return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.ID, b.ID))
	})
	pod.State = worst(pod.Containers)
	if len(pod.Containers) == 0 {
		pod.Note = "no container runs"
	}
	return pod
}

// worst is the worst state of containers, and unknown if there are none.
func worst(containers []Container) truststore.State {
	states := []truststore.State{truststore.Unknown, truststore.FilesOnly, truststore.Trusted}
	for _, state := range states {
		if slices.ContainsFunc(containers, func(c Container) bool { return c.State == state }) {
			return state
		}
	}
	return truststore.Unknown
}
