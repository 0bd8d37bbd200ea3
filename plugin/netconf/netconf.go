// Package netconf is sluice's entry in a CNI network configuration list, and the CNI_ARGS that come with it.
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

	"github.com/containernetworking/cni/pkg/types"
	current "github.com/containernetworking/cni/pkg/types/100"
	"github.com/containernetworking/cni/pkg/version"

	"github.com/sluice-cni/sluice/plugin/attach"
	"github.com/sluice-cni/sluice/plugin/ruleset"
)

// PodAnnotations is the capability by which containerd hands a pod's annotations to plugins that ask for it.
const PodAnnotations = "io.kubernetes.cri.pod-annotations"

// annotationPrefix marks the annotations that are ours.
const annotationPrefix = "sluice.dev/"

// What to do with a pod whose labels cannot be known because the daemon is down.
const (
	Hold = "hold" // capture it until they are
	Fail = "fail" // make ADD fail with error 11
)

// Conf is the configuration of one call.
type Conf struct {
	types.PluginConf

	AgentSocket string `json:"agentSocket"`
	StateDir    string `json:"stateDir"`
	// IncludeNamespaces, when not empty, are the only ones that sluice asks about.
	IncludeNamespaces []string `json:"includeNamespaces"`
	ExcludeNamespaces []string `json:"excludeNamespaces"`
	OnDaemonDown      string   `json:"onDaemonDown"`
	Backend           string   `json:"backend"`
	// StatusNeedsUpstream makes STATUS fail while the upstream is late, so that the node takes no pods.
	StatusNeedsUpstream bool `json:"statusNeedsUpstream"`

	RuntimeConfig struct {
		PodAnnotations map[string]string `json:"io.kubernetes.cri.pod-annotations"`
	} `json:"runtimeConfig"`

	raw map[string]json.RawMessage
}

// own are the keys of our entry.
var own = []string{
	"agentSocket", "stateDir", "includeNamespaces", "excludeNamespaces", "onDaemonDown", "backend", "statusNeedsUpstream",
}

// given are those that the CNI spec gives every plugin; it also keeps everything under cni.dev/ for itself.
var given = []string{
	"cniVersion", "cniVersions", "name", "type", "args", "ipMasq", "ipam", "dns", "capabilities", "runtimeConfig",
	"prevResult", "disableCheck", "disableGC", "loadOnlyInlinedPlugins",
}

const reservedPrefix = "cni.dev/"

// Parse reads what a runtime gives a plugin on standard input, with the defaults filled in. It takes a
// configuration that Validate would not: DEL must be able to undo what an older one did.
func Parse(stdin []byte) (*Conf, error) {
	c := &Conf{
		AgentSocket:       attach.DefaultSocket,
		StateDir:          attach.DefaultStateDir,
		ExcludeNamespaces: []string{"kube-system", "sluice-system"},
		OnDaemonDown:      Hold,
		Backend:           ruleset.BackendAuto,
	}
	dec := json.NewDecoder(bytes.NewReader(stdin))
	if err := dec.Decode(&c.raw); err != nil {
		return nil, fmt.Errorf("network configuration is not a JSON object: %w", err)
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return nil, errors.New("network configuration: something follows the JSON object")
	}
	if err := json.Unmarshal(stdin, c); err != nil {
		var wrong *json.UnmarshalTypeError
		if errors.As(err, &wrong) && wrong.Field != "" {
			key, _, _ := strings.Cut(strings.TrimPrefix(wrong.Field, "PluginConf."), ".")
			return nil, fmt.Errorf("network configuration: %s: %s is not a %s", wrong.Field, compact(c.raw[key]), kind(wrong))
		}
		return nil, fmt.Errorf("network configuration: %w", err)
	}
	if err := version.ParsePrevResult(&c.PluginConf); err != nil {
		return nil, fmt.Errorf("network configuration: prevResult: %w", err)
	}
	return c, nil
}

func compact(raw json.RawMessage) string {
	var b bytes.Buffer
	if json.Compact(&b, raw) != nil || b.Len() > 100 {
		return "its value"
	}
	return b.String()
}

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

// Validate names the first key that is not known, then the first value that is not one.
func (c *Conf) Validate() error {
	for _, key := range slices.Sorted(maps.Keys(c.raw)) {
		if !slices.Contains(own, key) && !slices.Contains(given, key) && !strings.HasPrefix(key, reservedPrefix) {
			return fmt.Errorf("unknown key %q; the keys of a sluice entry are %s", key, strings.Join(own, ", "))
		}
	}
	for _, p := range []struct{ key, path string }{{"agentSocket", c.AgentSocket}, {"stateDir", c.StateDir}} {
		if !filepath.IsAbs(p.path) {
			return fmt.Errorf("%s: %q is not an absolute path", p.key, p.path)
		}
	}
	if want := []string{Hold, Fail}; !slices.Contains(want, c.OnDaemonDown) {
		return fmt.Errorf("onDaemonDown: %q is not one of %s", c.OnDaemonDown, strings.Join(want, ", "))
	}
	if want := []string{ruleset.BackendAuto, ruleset.BackendIPTables, ruleset.BackendNFTables}; !slices.Contains(want, c.Backend) {
		return fmt.Errorf("backend: %q is not one of %s", c.Backend, strings.Join(want, ", "))
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

// Excluded tells whether sluice has nothing to do with pods of this namespace.
func (c *Conf) Excluded(namespace string) bool {
	if len(c.IncludeNamespaces) > 0 && !slices.Contains(c.IncludeNamespaces, namespace) {
		return true
	}
	return slices.Contains(c.ExcludeNamespaces, namespace)
}

// Result is what the plugins before this one made of the pod.
func (c *Conf) Result() (*current.Result, error) {
	if c.PrevResult == nil {
		return nil, errors.New("no prevResult: sluice is a chained plugin; in a conflist its entry comes after that of the primary plugin")
	}
	return current.GetResult(c.PrevResult)
}

// PrintResult writes prevResult as it came in. Only a runtime that hands it over in another version than
// it asks for gets it converted, which would drop what that version does not know.
func (c *Conf) PrintResult(w io.Writer) error {
	var came struct{ CNIVersion string }
	raw := c.raw["prevResult"]
	if err := json.Unmarshal(raw, &came); err == nil && came.CNIVersion == c.CNIVersion {
		_, err := w.Write(raw)
		return err
	}
	converted, err := c.PrevResult.GetAsVersion(c.CNIVersion)
	if err != nil {
		return err
	}
	return converted.PrintTo(w)
}

// Annotations are the pod's sluice.dev/ annotations, where the runtime hands them over.
func (c *Conf) Annotations() map[string]string {
	ours := maps.Clone(c.RuntimeConfig.PodAnnotations)
	maps.DeleteFunc(ours, func(k, _ string) bool { return !strings.HasPrefix(k, annotationPrefix) })
	return ours
}

// ParseArgs reads the pod's names from CNI_ARGS.
func ParseArgs(args string) (attach.Pod, error) {
	var k8s struct {
		types.CommonArgs
		K8S_POD_NAMESPACE, K8S_POD_NAME, K8S_POD_UID types.UnmarshallableString //nolint:revive,staticcheck // their names
	}
	k8s.IgnoreUnknown = true
	if err := types.LoadArgs(args, &k8s); err != nil {
		return attach.Pod{}, fmt.Errorf("CNI_ARGS %q: %w", args, err)
	}
	pod := attach.Pod{Namespace: string(k8s.K8S_POD_NAMESPACE), Name: string(k8s.K8S_POD_NAME), UID: string(k8s.K8S_POD_UID)}
	if err := pod.Validate(); err != nil {
		return attach.Pod{}, fmt.Errorf("CNI_ARGS: %w", err)
	}
	return pod, nil
}
