package drill

import (
	"slices"
	"syscall"
)

// fault is a failure of the node, of its daemon or proxy, or of a pod.
type fault struct {
	name      string
	protocols []string          // of the upstreams that can have it; nil for all
	prepare   func(*drillScene) // before the daemon starts; may be nil
	strike    func(*drillScene)
	undo      func(*drillScene) // after a random time; nil if strike has undone it already
}

func (f fault) fits(protocol string) bool {
	return f.protocols == nil || slices.Contains(f.protocols, protocol)
}

// drill is a series of faults that share a node.
type drill struct {
	name   string
	faults []fault
}

// of returns the faults that a drill with this upstream has. The protocols that are asked in other ways than connect
// need only the faults that name them.
func (d drill) of(protocol string) []fault {
	return slices.DeleteFunc(slices.Clone(d.faults), func(f fault) bool {
		return !f.fits(protocol) || f.protocols == nil && protocol != "connect" && protocol != "sockets"
	})
}

// Protocols of upstreams: all, those to which the daemon relays, and those of them that answer.
var (
	protocols = []string{"connect", "socks5", "proxy-v2", "sockets"}
	relayed   = []string{"connect", "socks5", "proxy-v2"}
	answered  = []string{"connect", "socks5"}
)

// drills are all faults.
var drills = []drill{
	{"hand-over", []fault{{name: "hand-over", strike: (*drillScene).succeed}}},
	{"another protocol", []fault{{
		name: "another protocol", prepare: (*drillScene).takeEveryProtocol, strike: (*drillScene).changeProtocol,
	}}},
	{"killed", []fault{
		{name: "daemon killed", strike: (*drillScene).killDaemon, undo: (*drillScene).start},
		{name: "upstream killed", strike: (*drillScene).killProxy, undo: (*drillScene).launchProxy},
		{name: "both killed", strike: func(s *drillScene) {
			s.losing(ends, func() { // with the last holder of a listener go those that wait there
				s.proxy.Kill()
				s.d.Kill()
				s.waitForNoListener()
			})
		}, undo: func(s *drillScene) {
			s.start()
			s.launchProxy()
		}},
	}},
	{"upstream stopped", []fault{{
		name:   "upstream stopped",
		strike: func(s *drillScene) { s.proxy.Freeze() },
		undo:   func(s *drillScene) { s.proxy.Signal(syscall.SIGCONT) },
	}}},
	{"conflist", []fault{{
		name:    "conflist clobbered",
		prepare: func(s *drillScene) { s.n.Install() }, strike: (*drillScene).clobberConflist,
	}}},
	{"disk", []fault{{
		name:    "disk full",
		prepare: (*drillScene).mountStateDir, strike: (*drillScene).fillDisk, undo: (*drillScene).emptyDisk,
	}}},
	{"descriptors", []fault{{
		name: "descriptors used up", strike: (*drillScene).useUpDescriptors, undo: (*drillScene).freeDescriptors,
	}}},
	{"conntrack", []fault{{
		name: "conntrack full", strike: (*drillScene).fillConntrack, undo: (*drillScene).emptyConntrack,
	}}},
	{"clock", []fault{{name: "clock jumped", strike: (*drillScene).jumpClock}}},
	{"successor", []fault{
		cannotStart("metrics of another node", spoilMetrics, mendMetrics),
		cannotStart("folder as proxy socket", spoilProxySocket, mendProxySocket),
		cannotStart("file as data folder", spoilDataDir, mendDataDir),
		{name: "daemon stopped beside its successor", strike: (*drillScene).stopBeside, undo: (*drillScene).wakeBeside},
	}},
	{"SIGTERM", []fault{{
		name:   "SIGTERM under ADD and DEL",
		strike: (*drillScene).terminateUnderChurn, undo: (*drillScene).endChurn,
	}}},
	{"early answers", []fault{{
		name: "early answers", protocols: relayed,
		strike: (*drillScene).answerUploads, undo: (*drillScene).restoreProxy,
	}}},
	{"hostile proxy", append(hostileProxies(), hostileTakers()...)},
	{"hostile pod", hostilePods()},
}
