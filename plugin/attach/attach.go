// Package attach holds the common ground of plugin and daemon: the attachment, its record on disk, and the
// requests and answers on the agent socket.
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

// AnnotationPrefix begins the key of each pod annotation that sluice reads. Annotations with other prefixes belong to
// other programs.
const AnnotationPrefix = "sluice.dev/"

// OptInAnnotation says whether a pod opted in when it was created, "true" or "false". The admission policy of the chart
// writes it over any value that the pod has.
const OptInAnnotation = AnnotationPrefix + "opt-in"

// ID names an attachment by the CNI spec's key: CNI_CONTAINERID and CNI_IFNAME.
type ID struct {
	ContainerID string `json:"containerID"`
	IfName      string `json:"ifName"`
}

// String returns containerID/ifname.
func (id ID) String() string { return id.ContainerID + "/" + id.IfName }

// ParseID reads the form that String writes.
func ParseID(s string) (ID, error) {
	container, ifName, _ := strings.Cut(s, "/")
	id := ID{ContainerID: container, IfName: ifName}
	return id, id.Validate()
}

// containerID matches the container IDs that the CNI spec allows. The length is checked separately: compiling
// `{0,199}` would take 0.5 ms at every start of the plugin.
var containerID = regexp.MustCompile(`^[a-zA-Z0-9][a-zA-Z0-9_.-]*$`)

// maxContainerID, in bytes, keeps the name of a record's file within the 255 bytes of NAME_MAX.
const maxContainerID = 200

// Validate returns an error for an ID that cannot be part of a file name or of a rule.
func (id ID) Validate() error {
	if len(id.ContainerID) > maxContainerID || !containerID.MatchString(id.ContainerID) {
		return fmt.Errorf("container ID %q: want 1 to 200 letters, digits, '_', '.' or '-'", id.ContainerID)
	}
	return ruleset.ValidateInterface(id.IfName)
}

// Pod names the pod of an attachment (K8S_POD_* in CNI_ARGS). Every field is empty if the runtime names no pod.
type Pod struct {
	Namespace string `json:"namespace,omitempty"`
	Name      string `json:"name,omitempty"`
	UID       string `json:"uid,omitempty"`
}

// String returns namespace/name, or "-" if the runtime named no pod.
func (p Pod) String() string {
	if p == (Pod{}) {
		return "-"
	}
	return p.Namespace + "/" + p.Name
}

// podWord matches the names that Kubernetes and podman use; all of its characters are allowed in a header.
var podWord = regexp.MustCompile(`^[a-zA-Z0-9_.-]*$`)

// maxPodWord is the length of the longest name that Kubernetes allows (RFC 1123 subdomain).
const maxPodWord = 253

// Validate returns an error for a value that a header or an event could not carry.
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
	// Network is the name of the network configuration; a GC is for one network.
	Network string `json:"network"`
	// Netns is the path of the pod's network namespace.
	Netns string `json:"netns"`
	Pod   Pod    `json:"pod"`
	// IPs are the addresses in prevResult.
	IPs []netip.Addr `json:"ips"`
	// Annotations are the pod's annotations with AnnotationPrefix, and those of Sidecars, if the runtime passes
	// annotations to plugins.
	Annotations map[string]string `json:"annotations,omitempty"`
}

// String returns namespace/name (containerID/ifname), or containerID/ifname if the runtime named no pod.
func (a Attachment) String() string {
	if a.Pod == (Pod{}) {
		return a.ID.String()
	}
	return a.Pod.String() + " (" + a.ID.String() + ")"
}

// Validate returns an error that names the first missing or invalid value.
func (a Attachment) Validate() error {
	if a.Netns == "" {
		return errors.New("no netns path")
	}
	if err := a.ID.Validate(); err != nil {
		return err
	}
	return a.Pod.Validate()
}

// Sidecar is the proxy of a service mesh that runs in pods, and the signs by which it is known there.
type Sidecar struct {
	Mesh       string
	Annotation string // that the mesh's injector sets on the pod
	Container  string // its name
}

// Sidecars are those that capture the connections of their pod. sluice cannot capture the same connections.
var Sidecars = []Sidecar{
	{Mesh: "Istio", Annotation: "sidecar.istio.io/status", Container: "istio-proxy"},
	{Mesh: "Linkerd", Annotation: "linkerd.io/proxy-version", Container: "linkerd-proxy"},
}

// State says whether an attachment is captured.
type State string

// The states.
const (
	// Adding means that an ADD has begun to install rules and has not finished. It may have been killed, so any part of
	// the rules may be there.
	Adding      State = "adding"
	Captured    State = "captured"
	Provisional State = "provisional" // captured until the daemon has decided
	Passed      State = "not captured"
	// Removing means that a DEL has begun to remove rules and has not finished.
	Removing State = "removing"
)

// Record is an attachment on disk, for the next daemon, for DEL, CHECK and GC.
type Record struct {
	Attachment
	NetnsID NetnsID `json:"netnsID"`
	State   State   `json:"state"`
	// Trust is that of the decision. It is the zero value until there is one.
	Trust Trust `json:"trust"`
	// Installed is nil if no ruleset was installed, or none to its end.
	Installed *ruleset.Installed `json:"installed,omitempty"`
	// Uncaptured is how many packets of a pod left around the upstream before it was captured, or was refused and held
	// without a limit, because its provisional capture had expired.
	Uncaptured uint64 `json:"uncaptured,omitempty"`
}

// Late is the policy for an attachment's connections while the upstream is late.
type Late struct {
	Policy LatePolicy `json:"policy"`
	// Timeout limits how long a connection waits, or with Hold how long ADD waits; 0 is no limit. In JSON it is in
	// nanoseconds.
	Timeout time.Duration `json:"timeout"`
}

// LatePolicy is one of LatePolicies.
type LatePolicy string

// The policies.
const (
	// Queue: connections wait, and are reset after the timeout.
	Queue LatePolicy = "queue"
	// Hold: ADD waits, so that the pod does not start, and fails after the timeout. Once ADD has succeeded,
	// connections wait as with Queue, without a timeout.
	Hold LatePolicy = "hold"
	// Direct: connections wait, and after the timeout go to their original destinations without the upstream.
	Direct LatePolicy = "direct"
)

// LatePolicies are all late policies.
var LatePolicies = []LatePolicy{Queue, Hold, Direct}

// Decision is the daemon's answer to an attachment.
type Decision struct {
	Capture bool `json:"capture"`
	// Ruleset is the ruleset to install. It is set if Capture is true; the pod's listeners are then open already.
	Ruleset *ruleset.Ruleset `json:"ruleset,omitempty"`
	// Provisional means that the pod is captured until the daemon knows whether it opted in.
	Provisional bool `json:"provisional,omitempty"`
	Late        Late `json:"late"`
	// Trust is about TLS. It is set if Capture is true.
	Trust Trust `json:"trust"`
	// Reason is the reason for the decision, for logs. An answer without a reason is not a decision.
	Reason string `json:"reason"`
}

// State returns the state of an attachment with this decision.
func (d Decision) State() State {
	switch {
	case d.Provisional:
		return Provisional
	case d.Capture:
		return Captured
	default:
		return Passed
	}
}
