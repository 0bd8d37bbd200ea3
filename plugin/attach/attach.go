// Package attach is what plugin and daemon have in common: an attachment, its record on disk, and the
// words they say to each other over the agent socket.
package attach

import (
	"errors"
	"fmt"
	"net/netip"
	"regexp"
	"strings"
	"time"

	"github.com/sluice-cni/sluice/plugin/ruleset"
)

// ID names an attachment: the CNI spec's key of everything that was added.
type ID struct {
	ContainerID string `json:"containerID"`
	IfName      string `json:"ifName"`
}

func (id ID) String() string { return id.ContainerID + "/" + id.IfName }

// ParseID reads what String writes.
func ParseID(s string) (ID, error) {
	c, i, _ := strings.Cut(s, "/")
	id := ID{ContainerID: c, IfName: i}
	return id, id.Validate()
}

// containerID is what the CNI spec allows. Lengths are checked apart: to compile `{0,199}` takes 0.5 ms, at
// every start of the plugin.
var containerID = regexp.MustCompile(`^[a-zA-Z0-9][a-zA-Z0-9_.-]*$`)

// maxContainerID keeps a record's file name a file name.
const maxContainerID = 200

// Validate reports an ID that cannot be a file name or stand in a rule.
func (id ID) Validate() error {
	if len(id.ContainerID) > maxContainerID || !containerID.MatchString(id.ContainerID) {
		return fmt.Errorf("container ID %q: want 1 to 200 letters, digits, '_', '.' or '-'", id.ContainerID)
	}
	return ruleset.ValidateInterface(id.IfName)
}

// Pod is who a connection belongs to. All of it is empty where the runtime names no pod.
type Pod struct {
	Namespace string `json:"namespace,omitempty"`
	Name      string `json:"name,omitempty"`
	UID       string `json:"uid,omitempty"`
}

func (p Pod) String() string {
	if p == (Pod{}) {
		return "-"
	}
	return p.Namespace + "/" + p.Name
}

// podWord is what Kubernetes and podman use in names, and what can stand in a header.
var podWord = regexp.MustCompile(`^[a-zA-Z0-9_.-]*$`)

// maxPodWord is the longest name that Kubernetes has (RFC 1123 subdomain).
const maxPodWord = 253

// Validate reports a value that a header or an event could not carry.
func (p Pod) Validate() error {
	for _, w := range []struct{ key, value string }{{"namespace", p.Namespace}, {"name", p.Name}, {"UID", p.UID}} {
		if len(w.value) > maxPodWord || !podWord.MatchString(w.value) {
			return fmt.Errorf("pod %s %q: want at most 253 letters, digits, '_', '.' or '-'", w.key, w.value)
		}
	}
	return nil
}

// Attachment is one CNI (containerID, ifname) that the plugin was asked to add, captured or not.
type Attachment struct {
	ID
	// Network is the name of the network configuration; GC is for one network at a time.
	Network string `json:"network"`
	// Netns is the path of the pod's network namespace.
	Netns string       `json:"netns"`
	Pod   Pod          `json:"pod"`
	IPs   []netip.Addr `json:"ips"`
	// Annotations are the pod's, where the runtime hands them to plugins.
	Annotations map[string]string `json:"annotations,omitempty"`
}

func (a Attachment) String() string {
	if a.Pod == (Pod{}) {
		return a.ID.String()
	}
	return a.Pod.String() + " (" + a.ID.String() + ")"
}

// Validate reports the first value that is not one.
func (a Attachment) Validate() error {
	if a.Netns == "" {
		return errors.New("no netns path")
	}
	if err := a.ID.Validate(); err != nil {
		return err
	}
	return a.Pod.Validate()
}

// State is what is done with an attachment.
type State string

// The states. A record that is neither captured nor passed waits for the daemon to decide.
const (
	Captured    State = "captured"
	Provisional State = "provisional" // captured until the daemon knows
	Passed      State = "not captured"
)

// Record is an attachment as it stands on disk, for whoever comes after: the next daemon, DEL, CHECK.
type Record struct {
	Attachment
	NetnsID NetnsID `json:"netnsID"`
	State   State   `json:"state"`
	// Installed is nil when nothing was.
	Installed *ruleset.Installed `json:"installed,omitempty"`
}

// Late says what becomes of the connections of an attachment while the upstream is late.
type Late struct {
	Policy LatePolicy `json:"policy"`
	// Timeout is how long a connection waits, or with Hold how long ADD does; 0 for as long as it takes.
	Timeout time.Duration `json:"timeout"`
}

// LatePolicy is one of the ways to wait.
type LatePolicy string

// The policies.
const (
	Queue LatePolicy = "queue" // connections wait, and are reset after the timeout
	Hold  LatePolicy = "hold"  // ADD waits, so that the pod does not start, and fails after the timeout; then as Queue without one
	// Direct: connections wait, and after the timeout go to their original destinations without the upstream.
	Direct LatePolicy = "direct"
)

// LatePolicies are all of them.
var LatePolicies = []LatePolicy{Queue, Hold, Direct}

// Decision is the daemon's answer to an attachment.
type Decision struct {
	Capture bool `json:"capture"`
	// Ruleset is what to install; only with Capture, and then the pod's listeners are open already.
	Ruleset *ruleset.Ruleset `json:"ruleset,omitempty"`
	// Provisional means that it is captured until the daemon knows whether it is to be.
	Provisional bool `json:"provisional,omitempty"`
	Late        Late `json:"late"`
	// Reason says why, for logs. A decision without one is none.
	Reason string `json:"reason"`
}
