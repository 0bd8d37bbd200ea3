package attach

import (
	"cmp"
	"net/netip"
)

// Trust says whether a pod's containers are given the CA of the proxy, and what happens to their TLS. An empty policy
// is not set: it is Pass as soon as the daemon has a CA, and until then proxies do as they like.
type Trust struct {
	// CA is true if the CA is added to the trust stores of the containers.
	CA bool `json:"ca"`
	// TLS is the policy for containers that are not known to trust the CA.
	TLS TLSPolicy `json:"tls,omitempty"`
	// Nested is the policy for containers that a Docker in the pod starts. With Inspect and CA they are given the CA,
	// and the TLS of those that trust it is inspected. With Inspect alone all their TLS is.
	Nested TLSPolicy `json:"nested,omitempty"`
}

// TLSPolicy is one of TLSPolicies.
type TLSPolicy string

// The policies.
const (
	// Pass lets TLS through untouched: the proxy sees its destination and name, and nothing breaks.
	Pass TLSPolicy = "pass"
	// Inspect terminates TLS: a client that does not trust the CA fails.
	Inspect TLSPolicy = "inspect"
)

// TLSPolicies are all policies for TLS.
var TLSPolicies = []TLSPolicy{Pass, Inspect}

// PodTrust is what proxies need to know to treat a pod's TLS. The zero value says nothing.
type PodTrust struct {
	// State is a truststore.State: how far the containers of the pod trust the CA, the least of theirs. Nested
	// containers in the pod's own network count as the pod's.
	State string
	// TLS and Nested are those of Trust.
	TLS, Nested TLSPolicy
	// Containers are the states of nested containers by their addresses, if these are given the CA.
	Containers map[netip.Addr]string
}

// Container is the state of the nested container with an address, or empty if they are not given the CA.
func (t PodTrust) Container(address netip.Addr) string {
	if t.Containers == nil {
		return ""
	}
	return cmp.Or(t.Containers[address], "unknown")
}
