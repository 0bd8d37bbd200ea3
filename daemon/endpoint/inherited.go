package endpoint

import (
	"maps"
	"os"

	"github.com/sluice-cni/sluice/daemon/gate"
	"github.com/sluice-cni/sluice/daemon/unixsock"
	"github.com/sluice-cni/sluice/plugin/attach"
	"github.com/sluice-cni/sluice/plugin/ruleset"
)

// capturePorts are those of the ruleset in the netns.
func (e *Endpoint) capturePorts() ruleset.Ports {
	if in := e.Installed(); in != nil {
		return in.Ruleset.CapturePorts()
	}
	return ruleset.DefaultPorts
}

// Inherit takes over the listeners that another daemon has handed over. An endpoint that opens its gate uses them.
func (t *Table) Inherit(listeners map[attach.NetnsID][]*os.File) {
	t.mu.Lock()
	defer t.mu.Unlock()
	maps.Copy(t.inherited, listeners)
}

// Return takes over listeners that a proxy holds of a daemon that did not live to hand them over. It reports whether
// they are wanted: a captured endpoint has no gate, and can open none while the proxy has these. Otherwise, and if they
// do not belong to that endpoint, they are closed.
func (t *Table) Return(netns string, files []*os.File) (wanted bool) {
	e := t.withoutGate(netns)
	if e != nil {
		if err := gate.Verify(files, e.ID, e.capturePorts()); err != nil {
			t.log.Error("listeners that a proxy returned are not those of the netns", "netnsID", netns, "err", err)
			e = nil
		}
	}
	if e == nil {
		unixsock.Close(files)
		return false
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.endpoints[e.ID] != e || t.inherited[e.ID] != nil { // dropped meanwhile, or another proxy was faster
		unixsock.Close(files)
		return false
	}
	t.inherited[e.ID] = files
	return true
}

// withoutGate returns the endpoint with that identity if it is captured and has no gate.
func (t *Table) withoutGate(netns string) *Endpoint {
	for _, e := range t.All() {
		if e.ID.String() == netns && e.lacksGate() {
			return e
		}
	}
	return nil
}

// DropInherited closes the inherited listeners that no endpoint has used.
func (t *Table) DropInherited() {
	t.mu.Lock()
	defer t.mu.Unlock()
	for id, files := range t.inherited {
		unixsock.Close(files)
		delete(t.inherited, id)
	}
}

// takeInherited returns the inherited listeners of a netns, once.
func (t *Table) takeInherited(id attach.NetnsID) []*os.File {
	t.mu.Lock()
	defer t.mu.Unlock()
	files := t.inherited[id]
	delete(t.inherited, id)
	return files
}
