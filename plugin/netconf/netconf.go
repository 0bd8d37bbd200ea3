// Package netconf parses, validates and renders sluice's entry in a CNI network configuration list, and parses the
// CNI_ARGS that come with it.
package netconf

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/containernetworking/cni/pkg/types"
	current "github.com/containernetworking/cni/pkg/types/100"
	"github.com/containernetworking/cni/pkg/version"

	"github.com/sluice-cni/sluice/plugin/attach"
	"github.com/sluice-cni/sluice/plugin/ruleset"
)

// PodAnnotations is the capability with which a plugin asks containerd for the pod's annotations.
const PodAnnotations = "io.kubernetes.cri.pod-annotations"

// Versions are the versions of the CNI specification that the plugin serves, the oldest first. 0.1.0 and 0.2.0 have
// another format of results, and know no chains of plugins.
var Versions = []string{"0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"}

// Values of the key `onDaemonDown`: the treatment of a pod with unknown labels, since the daemon is down.
const (
	Hold = "hold" // ADD captures the pod until its labels are known
	Fail = "fail" // ADD fails with error 11, try again later
)

// Values of the key `optIn`: the party that says whether a new pod opted in.
const (
	OptInDaemon     = "daemon"     // the daemon, by the labels of the pod and its namespace
	OptInAnnotation = "annotation" // attach.OptInAnnotation, and the daemon for a pod without it
)

// Conf is the network configuration that the runtime passes to one call of the plugin.
type Conf struct {
	types.PluginConf

	// AgentSocket is the path of the daemon's unix socket.
	AgentSocket string `json:"agentSocket"`
	// StateDir is the directory of the attachment records.
	StateDir string `json:"stateDir"`
	// DataDir is the directory of the files that outlive the boot.
	DataDir string `json:"dataDir"`
	// IncludeNamespaces, if not empty, are the only namespaces in which sluice asks the daemon about pods.
	IncludeNamespaces []string `json:"includeNamespaces"`
	// ExcludeNamespaces are namespaces in which sluice lets pods pass without asking.
	ExcludeNamespaces []string `json:"excludeNamespaces"`
	// OnDaemonDown is Hold or Fail.
	OnDaemonDown string `json:"onDaemonDown"`
	// OptIn is OptInDaemon or OptInAnnotation.
	OptIn string `json:"optIn"`
	// ProvisionalFor is a duration: how long the plugin holds the TCP of a pod with unknown labels if nothing in its
	// namespace is known to have opted in. "0s" is no limit.
	ProvisionalFor string `json:"provisionalFor"`
	// Backend is ruleset.BackendAuto, BackendIPTables or BackendNFTables.
	Backend string `json:"backend"`
	// StatusNeedsUpstream makes STATUS fail while the upstream is late, so that the node takes no pods.
	StatusNeedsUpstream bool `json:"statusNeedsUpstream"`

	// RuntimeConfig holds the values of the capabilities that the runtime supports.
	RuntimeConfig struct {
		PodAnnotations map[string]string `json:"io.kubernetes.cri.pod-annotations"`
	} `json:"runtimeConfig"`

	raw map[string]json.RawMessage // every key with its value as it came in
}

// ownKeys are the keys of sluice's entry.
var ownKeys = []string{
	"agentSocket", "stateDir", "dataDir", "includeNamespaces", "excludeNamespaces", "onDaemonDown", "optIn",
	"provisionalFor", "backend", "statusNeedsUpstream",
}

// specKeys are the keys that the CNI spec defines for every plugin. It also reserves every key under cni.dev/.
var specKeys = []string{
	"cniVersion", "cniVersions", "name", "type", "args", "ipMasq", "ipam", "dns", "capabilities", "runtimeConfig",
	"prevResult", "disableCheck", "disableGC", "loadOnlyInlinedPlugins",
}

const reservedPrefix = "cni.dev/"

// Parse reads the configuration that a runtime writes to a plugin's standard input, and fills in the defaults. It
// accepts values that Validate rejects.
func Parse(stdin []byte) (*Conf, error) {
	c, err := parseObject(stdin)
	if err != nil {
		return nil, err
	}
	if err := c.decode(stdin); err != nil {
		return nil, fmt.Errorf("network configuration: %w", err)
	}
	if err := version.ParsePrevResult(&c.PluginConf); err != nil {
		return nil, fmt.Errorf("network configuration: prevResult: %w", err)
	}
	return c, nil
}

// ParseForRemoval is Parse for DEL and GC, which have to undo the ADDs of older configurations. A value of the wrong
// type, or a path that is not absolute, is in ignored, and the default takes its place. Only for a needed key is it an
// error. prevResult is not read.
func ParseForRemoval(stdin []byte, needed ...string) (c *Conf, ignored []error, err error) {
	if c, err = parseObject(stdin); err != nil {
		return nil, nil, err
	}
	for _, key := range slices.Sorted(maps.Keys(c.raw)) {
		if key == "prevResult" {
			continue // it describes interfaces and addresses, of which nothing is removed
		}
		one, err := json.Marshal(map[string]json.RawMessage{key: c.raw[key]})
		if err != nil {
			return nil, nil, fmt.Errorf("network configuration: %s: %w", key, err)
		}
		switch err := c.decode(one); {
		case err != nil && slices.Contains(needed, key):
			return nil, nil, fmt.Errorf("network configuration: %w", err)
		case err != nil:
			ignored = append(ignored, fmt.Errorf("network configuration: %w", err))
		}
	}
	for _, p := range []struct {
		key      string
		path     *string
		fallback string
	}{{"agentSocket", &c.AgentSocket, attach.DefaultSocket}, {"stateDir", &c.StateDir, attach.DefaultStateDir}} {
		if !filepath.IsAbs(*p.path) {
			ignored = append(ignored,
				fmt.Errorf("network configuration: %s: %q is not an absolute path", p.key, *p.path))
			*p.path = p.fallback
		}
	}
	return c, ignored, nil
}

// parseObject returns the defaults, and the keys of the configuration as they came in.
func parseObject(stdin []byte) (*Conf, error) {
	c := &Conf{
		AgentSocket:       attach.DefaultSocket,
		StateDir:          attach.DefaultStateDir,
		DataDir:           attach.DefaultDataDir,
		ExcludeNamespaces: []string{"kube-system", "sluice-system"},
		OnDaemonDown:      Hold,
		OptIn:             OptInDaemon,
		ProvisionalFor:    "2m",
		Backend:           ruleset.BackendAuto,
	}
	dec := json.NewDecoder(bytes.NewReader(stdin))
	if err := dec.Decode(&c.raw); err != nil {
		return nil, fmt.Errorf("network configuration is not a JSON object: %w", err)
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return nil, errors.New("network configuration: trailing data after the JSON object")
	}
	return c, nil
}

// decode sets the fields of c. Its error names the key and the value; a field of another type keeps its value.
func (c *Conf) decode(object []byte) error {
	err := json.Unmarshal(object, c)
	var wrong *json.UnmarshalTypeError
	if errors.As(err, &wrong) && wrong.Field != "" {
		key, _, _ := strings.Cut(strings.TrimPrefix(wrong.Field, "PluginConf."), ".")
		return fmt.Errorf("%s: %s is not a %s", wrong.Field, compact(c.raw[key]), kind(wrong))
	}
	return err
}

// compact returns a value for an error text, unless it is too long for one.
func compact(raw json.RawMessage) string {
	var b bytes.Buffer
	if json.Compact(&b, raw) != nil || b.Len() > 100 {
		return "its value"
	}
	return b.String()
}

// kind names the type that the key wants.
func kind(e *json.UnmarshalTypeError) string {
	switch k := e.Type.Kind().String(); k {
	case "slice":
		return "list of strings"
	case "struct", "map":
		return "JSON object"
	default:
		return k
	}
}

// Validate returns an error that names the first unknown key, or else the first invalid value and its key.
func (c *Conf) Validate() error {
	for _, key := range slices.Sorted(maps.Keys(c.raw)) {
		known := slices.Contains(ownKeys, key) || slices.Contains(specKeys, key)
		if !known && !strings.HasPrefix(key, reservedPrefix) {
			return fmt.Errorf("unknown key %q; the keys of a sluice entry are %s", key, strings.Join(ownKeys, ", "))
		}
	}
	for _, p := range []struct{ key, path string }{
		{"agentSocket", c.AgentSocket}, {"stateDir", c.StateDir}, {"dataDir", c.DataDir},
	} {
		if !filepath.IsAbs(p.path) {
			return fmt.Errorf("%s: %q is not an absolute path", p.key, p.path)
		}
	}
	for _, choice := range []struct {
		key, value string
		allowed    []string
	}{
		{"onDaemonDown", c.OnDaemonDown, []string{Hold, Fail}},
		{"optIn", c.OptIn, []string{OptInDaemon, OptInAnnotation}},
		{"backend", c.Backend, []string{ruleset.BackendAuto, ruleset.BackendIPTables, ruleset.BackendNFTables}},
	} {
		if !slices.Contains(choice.allowed, choice.value) {
			return fmt.Errorf("%s: %q is not one of %s", choice.key, choice.value, strings.Join(choice.allowed, ", "))
		}
	}
	if d, err := time.ParseDuration(c.ProvisionalFor); err != nil || d < 0 {
		return fmt.Errorf("provisionalFor: %q is not a duration such as 90s or 10m", c.ProvisionalFor)
	}
	for _, l := range []struct {
		key   string
		names []string
	}{{"includeNamespaces", c.IncludeNamespaces}, {"excludeNamespaces", c.ExcludeNamespaces}} {
		for _, n := range l.names {
			if err := (attach.Pod{Namespace: n}).Validate(); err != nil || n == "" {
				return fmt.Errorf("%s: %q is not a namespace", l.key, n)
			}
		}
	}
	return nil
}

// Excluded reports whether sluice lets the pods of this namespace pass without asking the daemon.
func (c *Conf) Excluded(namespace string) bool {
	if len(c.IncludeNamespaces) > 0 && !slices.Contains(c.IncludeNamespaces, namespace) {
		return true
	}
	return slices.Contains(c.ExcludeNamespaces, namespace)
}

// Result returns prevResult: the result of the plugins before sluice in the chain. Without one it returns an error.
func (c *Conf) Result() (*current.Result, error) {
	if c.PrevResult == nil {
		return nil, errors.New("no prevResult: sluice is a chained plugin; " +
			"in a conflist its entry comes after that of the primary plugin")
	}
	return current.GetResult(c.PrevResult)
}

// PrintResult writes prevResult byte for byte as it came in, if it has the CNI version that the runtime asks for.
// Otherwise it converts prevResult to that version, which drops fields that the version does not have.
func (c *Conf) PrintResult(w io.Writer) error {
	var prev struct{ CNIVersion string }
	raw := c.raw["prevResult"]
	if err := json.Unmarshal(raw, &prev); err == nil && prev.CNIVersion == c.CNIVersion {
		_, err := w.Write(raw)
		return err
	}
	converted, err := c.PrevResult.GetAsVersion(c.CNIVersion)
	if err != nil {
		return err
	}
	return converted.PrintTo(w)
}

// Annotations returns the pod's annotations with attach.AnnotationPrefix, and those by which attach.Sidecars are known,
// if the runtime passes annotations.
func (c *Conf) Annotations() map[string]string {
	wanted := maps.Clone(c.RuntimeConfig.PodAnnotations)
	maps.DeleteFunc(wanted, func(k, _ string) bool {
		return !strings.HasPrefix(k, attach.AnnotationPrefix) &&
			!slices.ContainsFunc(attach.Sidecars, func(s attach.Sidecar) bool { return s.Annotation == k })
	})
	return wanted
}

// HoldAtMost returns ProvisionalFor, of a valid Conf.
func (c *Conf) HoldAtMost() time.Duration {
	d, _ := time.ParseDuration(c.ProvisionalFor)
	return d
}

// OptedIn returns the value of attach.OptInAnnotation, if the entry says that an admission policy writes it and the pod
// has it.
func (c *Conf) OptedIn() (in, known bool) {
	value, ok := c.RuntimeConfig.PodAnnotations[attach.OptInAnnotation]
	if c.OptIn != OptInAnnotation || !ok {
		return false, false
	}
	return value != "false", true // the daemon judges any other value
}

// ParseArgs reads the pod's namespace, name and UID from CNI_ARGS; each may be missing.
func ParseArgs(args string) (attach.Pod, error) {
	var k8s struct {
		types.CommonArgs
		//nolint:revive,staticcheck // LoadArgs finds the fields by these names
		K8S_POD_NAMESPACE, K8S_POD_NAME, K8S_POD_UID types.UnmarshallableString
	}
	k8s.IgnoreUnknown = true
	if err := types.LoadArgs(args, &k8s); err != nil {
		return attach.Pod{}, fmt.Errorf("CNI_ARGS %q: %w", args, err)
	}
	pod := attach.Pod{
		Namespace: string(k8s.K8S_POD_NAMESPACE), Name: string(k8s.K8S_POD_NAME), UID: string(k8s.K8S_POD_UID),
	}
	if err := pod.Validate(); err != nil {
		return attach.Pod{}, fmt.Errorf("CNI_ARGS: %w", err)
	}
	return pod, nil
}
