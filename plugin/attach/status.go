package attach

import (
	"fmt"
	"time"
)

// Status is the daemon's status, as `sluiced status` shows it.
type Status struct {
	// NotReady says why the daemon does not serve fully yet: the plugin is not installed, or the API server
	// has not answered. It is empty if the daemon is ready.
	NotReady string `json:"notReady,omitempty"`
	// Contested says that another program keeps undoing the plugin's installation. It is zero while none does.
	Contested   Contest            `json:"contested,omitzero"`
	Upstream    UpstreamStatus     `json:"upstream"`
	Attachments []AttachmentStatus `json:"attachments"`
	// Uncaptured are the pods of this node that opted in and are not captured.
	Uncaptured []UncapturedPod `json:"uncaptured,omitempty"`
}

// Contest says that another program keeps undoing the plugin's installation.
type Contest struct {
	// Since is the time at which it was noticed.
	Since time.Time `json:"since"`
	// Reason names the file, the likely program, and the remedy.
	Reason string `json:"reason"`
}

// IsZero reports whether no program undoes the installation.
func (c Contest) IsZero() bool { return c == Contest{} }

// UncapturedPod is a running pod that opted in and is not captured.
type UncapturedPod struct {
	// Pod is Pod.String.
	Pod    string `json:"pod"`
	Reason string `json:"reason"`
}

// UpstreamStatus is the status of the upstream.
type UpstreamStatus struct {
	Address  string `json:"address"`
	Protocol string `json:"protocol"`
	Ready    bool   `json:"ready"`
	// Since is the time at which Ready last changed; at first it is the start of the daemon.
	Since time.Time `json:"since"`
	// Reason says why the upstream is not ready, or is its last answer that was an error.
	Reason string `json:"reason,omitempty"`
	// Proxies are the proxies that have taken listeners of pods; only with the protocol sockets.
	Proxies []ProxyStatus `json:"proxies,omitempty"`
}

// Late returns nil while the upstream is ready, otherwise an error with its address and the reason.
func (s UpstreamStatus) Late() error {
	if s.Ready {
		return nil
	}
	return fmt.Errorf("upstream %s is late: %s", s.Address, s.Reason)
}

// ProxyStatus is the status of one proxy that accepts in the netns of pods itself.
type ProxyStatus struct {
	Name string `json:"name"`
	// Since is the time at which the proxy connected.
	Since time.Time `json:"since"`
	// Hangs is true if the proxy is connected and does not answer.
	Hangs bool `json:"hangs"`
	// Pods is the number of pods from which the proxy has listeners.
	Pods int `json:"pods"`
	// Connections is the number of open connections that the proxy reports.
	Connections int `json:"connections"`
}

// ContainerTrust says how far one container trusts the proxy's CA.
type ContainerTrust struct {
	Name  string `json:"name"`
	Trust string `json:"trust"`
	// Note is the reason for another state than trusted, or a restriction of it.
	Note string `json:"note,omitempty"`
}

// AttachmentStatus is the status of one attachment, one line of the table of `sluiced status`.
type AttachmentStatus struct {
	// Pod is Pod.String, and Attachment is ID.String.
	Pod        string `json:"pod"`
	Attachment string `json:"attachment"`
	State      State  `json:"state"`
	// Waiting is the number of connections in the kernel's accept queues, plus those that are accepted and
	// have no answer from the upstream yet. SYNs that the SYN gate drops are not counted.
	Waiting int `json:"waiting"`
	// Open is the number of connections that are being relayed.
	Open int `json:"open"`
	// Bytes is the number of relayed bytes, in both directions together.
	Bytes uint64 `json:"bytes"`
	Netns string `json:"netns"`
	// Backend is Installed.Backend; empty if there is no ruleset.
	Backend string `json:"backend,omitempty"`
	// Wall is Installed.Wall: the packets that the wall sees.
	Wall string `json:"wall,omitempty"`
	// Trust says how far the containers of the pod trust the proxy's CA: trusted, files-only or unknown. It is empty if
	// they are not to be given one.
	Trust string `json:"trust,omitempty"`
	// Containers are the running containers of the pod, if Trust is not empty.
	Containers []ContainerTrust `json:"containers,omitempty"`
	// Nested are the containers that a Docker in the pod has started, if they are given the CA.
	Nested []ContainerTrust `json:"nested,omitempty"`
	// Stopped is how many packets were stopped, by cause: pod, nested, packet, quic or other.
	Stopped map[string]uint64 `json:"stopped,omitempty"`
	// Notes name shortcomings, such as no SYN gate or a listener that cannot be opened.
	Notes []string `json:"notes,omitempty"`
}
