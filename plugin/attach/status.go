package attach

import (
	"fmt"
	"time"
)

// Status is what `sluiced status` shows.
type Status struct {
	// NotReady says why the daemon does not serve as it should yet: the plugin is not installed, the API
	// server has not been heard.
	NotReady    string             `json:"notReady,omitempty"`
	Upstream    UpstreamStatus     `json:"upstream"`
	Attachments []AttachmentStatus `json:"attachments"`
}

// UpstreamStatus is where the proxy is and whether it is there.
type UpstreamStatus struct {
	Address  string    `json:"address"`
	Protocol string    `json:"protocol"`
	Ready    bool      `json:"ready"`
	Since    time.Time `json:"since"`
	// Reason says why it is not ready, or what it last answered that is not as it should be.
	Reason string `json:"reason,omitempty"`
	// Proxies are those that took the listeners of pods, where they do (protocol sockets).
	Proxies []ProxyStatus `json:"proxies,omitempty"`
}

// Late is nil while the upstream is there.
func (s UpstreamStatus) Late() error {
	if s.Ready {
		return nil
	}
	return fmt.Errorf("upstream %s is late: %s", s.Address, s.Reason)
}

// ProxyStatus is one proxy that accepts in the netns of pods itself.
type ProxyStatus struct {
	Name  string    `json:"name"`
	Since time.Time `json:"since"`
	// Hangs is for one that is connected and does not answer.
	Hangs bool `json:"hangs"`
	// Pods are those whose listeners it has.
	Pods int `json:"pods"`
	// Connections are open, by its own word.
	Connections int `json:"connections"`
}

// AttachmentStatus is one line of the table.
type AttachmentStatus struct {
	Pod        string `json:"pod"`
	Attachment string `json:"attachment"`
	State      State  `json:"state"`
	// Waiting connections are those in the kernel's accept queues and those accepted but not yet
	// answered for by the upstream. SYNs held back at the gate are not seen.
	Waiting int `json:"waiting"`
	// Open connections are being relayed.
	Open int `json:"open"`
	// Bytes were relayed, both ways together.
	Bytes   uint64 `json:"bytes"`
	Netns   string `json:"netns"`
	Backend string `json:"backend,omitempty"`
	// Notes are what is not as one would wish: no SYN gate, a listener that cannot be opened.
	Notes []string `json:"notes,omitempty"`
}
