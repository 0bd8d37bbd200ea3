package trust

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/containerd/nri/pkg/api"

	"github.com/sluice-cni/sluice/daemon/printable"
	"github.com/sluice-cni/sluice/plugin/files"
	"github.com/sluice-cni/sluice/plugin/truststore"
)

// container is a container that runs.
type container struct {
	id, name string
	pod      string // its UID
	pid      int
	mounted  bool     // the fallback
	equipped bool     // with the variables
	named    []string // stores that its own variables name

	state   truststore.State
	note    string
	checked string        // the fingerprints of the CA at the last look
	looked  bool          // there has been one
	next    time.Time     // of the next look, if a repair has failed or a store changes; else zero
	busy    chan struct{} // closed when the look that goes on has ended; nil if none does
}

func (t *Trust) newContainer(podUID string, c *api.Container) *container {
	mounted := mountAt(c, MountPath)
	has := environment(c)
	_, equipped := has[variables[0].name]
	return &container{
		id: c.GetId(), name: c.GetName(), pod: podUID, pid: int(c.GetPid()),
		mounted:  mounted != nil && mounted.GetSource() == t.files.folder(),
		equipped: equipped, named: NamedStores(has),
		state: truststore.Unknown, note: "not looked at yet",
	}
}

// replaceAll takes over the runtime's list of containers, and removes the reports of others.
func (t *Trust) replaceAll(sandboxes []*api.PodSandbox, list []*api.Container) {
	uids := make(map[string]string) // by the ID of the sandbox
	for _, s := range sandboxes {
		uids[s.GetId()] = s.GetUid()
	}
	now := make(map[string]*container)
	ids := make(map[string]bool)
	for _, c := range list {
		ids[c.GetId()] = true
		switch c.GetState() {
		case api.ContainerState_CONTAINER_RUNNING, api.ContainerState_CONTAINER_PAUSED:
			now[c.GetId()] = t.newContainer(uids[c.GetPodSandboxId()], c)
		}
	}
	t.mu.Lock()
	before := t.containers
	for id, c := range before {
		if n := now[id]; n != nil && n.pid == c.pid {
			now[id], c.looked = c, false // a repair that failed is tried again
		}
	}
	t.containers, t.known, t.connected, t.problem = now, true, true, ""
	t.mu.Unlock()
	t.removeReports(ids)
	t.Check()
	t.settle()
	pods := make(map[string]bool)
	for _, list := range []map[string]*container{before, now} {
		for _, c := range list {
			pods[c.pod] = true
		}
	}
	for uid := range pods {
		t.changed(uid)
	}
}

// removeReports removes the reports of all containers but these, by their IDs.
func (t *Trust) removeReports(keep map[string]bool) {
	entries, err := os.ReadDir(t.files.reports())
	if err != nil {
		t.config.Log.Warn("reports of containers that are gone are not removed", "err", err)
	}
	for _, e := range entries {
		if id, isReport := strings.CutSuffix(e.Name(), ".json"); isReport && !keep[id] {
			t.removeReport(id)
		}
	}
}

func (t *Trust) removeReport(id string) {
	if err := files.Remove(t.files.report(id)); err != nil {
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
	if !t.config.Wanted(c.pod) {
		return
	}
	o, ok := t.outcome(c, current)
	t.mu.Lock()
	if ok {
		c.set(o, current, t.nextLook(o, nil))
	} else {
		t.checkLocked(c)
	}
	t.mu.Unlock()
	t.changed(c.pod)
}

// stop forgets a container.
func (t *Trust) stop(id string) {
	t.mu.Lock()
	c := t.containers[id]
	delete(t.containers, id)
	t.mu.Unlock()
	if c != nil {
		t.changed(c.pod)
	}
}

// removePod forgets a pod that has ended.
func (t *Trust) removePod(uid string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.served, uid)
}

// outcome is what is known about a container after a look at it.
type outcome struct {
	state    truststore.State
	note     string
	changing bool // a store changes without the container, and has to be looked at from time to time
}

func (c *container) set(o outcome, current ca, next time.Time) {
	c.state, c.note, c.checked, c.looked, c.next = o.state, o.note, current.fingerprints, true, next
}

// nextLook is the time of the next look at a container, or zero if it needs none. The error is that of the repair.
func (t *Trust) nextLook(o outcome, err error) time.Time {
	if err != nil || o.changing {
		return time.Now().Add(t.retryPause)
	}
	return time.Time{}
}

// isDue reports whether a look at a container is due.
func (c *container) isDue(current ca) bool {
	return !c.looked || c.checked != current.fingerprints || !c.next.IsZero() && !time.Now().Before(c.next)
}

// Check begins to look at the containers of wanted pods that it has not looked at, because a pod may have become wanted
// while they ran, and at those of which a repair failed a minute ago. The caller calls it from time to time.
func (t *Trust) Check() {
	t.mu.Lock()
	var pods []string
	for _, c := range t.containers {
		pods = append(pods, c.pod)
	}
	t.mu.Unlock()
	slices.Sort(pods)
	t.checkPods(slices.Compact(pods))
}

// checkPods looks at the containers of those pods that are wanted, and returns channels that are closed when
// that is done.
func (t *Trust) checkPods(uids []string) []<-chan struct{} {
	wanted := make(map[string]bool)
	for _, uid := range uids {
		wanted[uid] = t.config.Wanted(uid)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	var done []<-chan struct{}
	for _, c := range t.containers {
		if wanted[c.pod] && (c.busy != nil || c.isDue(t.ca)) {
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
		current, again := t.ca, !c.next.IsZero()
		t.mu.Unlock()
		o, err := t.examine(c, current, again)
		t.mu.Lock()
		if err != nil {
			o = outcome{state: truststore.Unknown, note: err.Error()}
			if o.note != c.note {
				t.config.Log.Warn("a container is not repaired", "container", c.id, "name", c.name, "err", err)
			}
		}
		c.set(o, current, t.nextLook(o, err))
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
	t.changed(c.pod)
}

// examine looks at a container, after a repair if the hook has left no report about the CA, or if this is another look
// at the container. The error is that of the repair.
func (t *Trust) examine(c *container, current ca, again bool) (outcome, error) {
	if o, ok := t.outcome(c, current); ok && (!again || !current.exists()) {
		return o, nil
	}
	if err := t.repair(c, t.isLate(c)); err != nil {
		return outcome{}, err
	}
	if o, ok := t.outcome(c, current); ok {
		return o, nil
	}
	report, err := readReport(t.files.report(c.id))
	if err != nil {
		return outcome{}, err
	}
	return outcome{}, errors.New(cmp.Or(report.Error, "the proxy's CA has changed meanwhile"))
}

// isLate reports whether a repair comes too late for the programs that run in a container: they may have connected
// already, and many read their trust store only once. With a new CA it does not, because the old one still serves.
func (t *Trust) isLate(c *container) bool {
	if report, err := readReport(t.files.report(c.id)); err == nil && report.Error == "" {
		return report.Late
	}
	t.mu.Lock()
	served := t.served[c.pod]
	t.mu.Unlock()
	return served || t.config.Older != nil && t.config.Older(c.pod)
}

// outcome reads the report of a container. It is not ok if a repair may lead to a better one.
func (t *Trust) outcome(c *container, current ca) (o outcome, ok bool) {
	if !current.exists() {
		return outcome{state: truststore.Unknown, note: current.problem}, true
	}
	report, err := readReport(t.files.report(c.id))
	if err != nil || report.Error != "" || joined(report.CA) != current.fingerprints {
		return outcome{}, false
	}
	o = outcome{state: report.State, note: NoteOf(report)}
	o.changing = slices.ContainsFunc(report.Stores, func(s truststore.Store) bool { return s.Changing })
	switch {
	case report.Late:
		o.state = truststore.Unknown
		o.note = "given the CA while it ran: programs that have read their trust store before do not trust it; start " +
			"the container anew"
	case o.note == "" && !c.equipped:
		o.note = "created without sluice: Node.js and Deno with their own roots do not trust the CA until the " +
			"container starts anew"
	}
	return o, true
}

// maxNotes bounds the stores that a note names.
const maxNotes = 3

// maxNote bounds the note of a store, in bytes: its path is the container's to choose.
const maxNote = 300

// NoteOf names the stores that have failed, and the search that did not end.
func NoteOf(report truststore.Report) string {
	var notes []string
	for _, s := range report.Stores {
		if s.Action == truststore.Failed && s.Kind != truststore.Anchor {
			notes = append(notes, printable.Text(fmt.Sprintf("%s %s: %s", s.Kind, s.Path, s.Error), maxNote))
		}
	}
	if report.Unsearched != "" {
		notes = append(notes, printable.Text(report.Unsearched, maxNote))
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
func (t *Trust) podLocked(podUID string) Pod {
	var pod Pod
	for _, c := range t.containers {
		if c.pod == podUID {
			pod.Containers = append(pod.Containers, Container{
				ID: c.id, Name: c.name, State: c.state, Note: c.note, Pending: !c.looked,
			})
		}
	}
	slices.SortFunc(pod.Containers, func(a, b Container) int {
		return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.ID, b.ID))
	})
	if len(pod.Containers) == 0 {
		pod.State, pod.Note = truststore.Unknown, "no container runs"
		return pod
	}
	pod.State = truststore.Trusted
	for _, c := range pod.Containers {
		pod.State = truststore.Worst(pod.State, c.State)
	}
	return pod
}
