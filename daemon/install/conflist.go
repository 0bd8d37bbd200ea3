package install

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/version"

	"github.com/sluice-cni/sluice/plugin/netconf"
)

// pluginType is the "type" of sluice's entry, and so the name of its binary.
const pluginType = "sluice"

// element is one entry of a conflist's "plugins": its byte offsets in the text, and whether it is sluice's.
type element struct {
	start, end int
	ours       bool
}

// elements finds the entries of the top-level "plugins". Conflists are edited by these offsets and never marshalled
// again, so that everything else in them (unknown keys, number formats, white space) stays as it was written.
func elements(text []byte) ([]element, error) {
	dec := json.NewDecoder(bytes.NewReader(text))
	if t, err := dec.Token(); err != nil || t != json.Delim('{') {
		return nil, errors.Join(errors.New("not a JSON object"), err)
	}
	var found []element
	listed := false
	for dec.More() {
		key, err := dec.Token()
		if err != nil {
			return nil, err
		}
		if key != "plugins" {
			var skipped json.RawMessage
			if err := dec.Decode(&skipped); err != nil {
				return nil, err
			}
			continue
		}
		if found, err = list(dec); err != nil { // if there are two lists, libcni takes the last
			return nil, fmt.Errorf(`"plugins": %w`, err)
		}
		listed = true
	}
	if !listed {
		return nil, errors.New(`it has no "plugins"`)
	}
	return found, nil
}

// list reads the list at which dec stands.
func list(dec *json.Decoder) ([]element, error) {
	if t, err := dec.Token(); err != nil || t != json.Delim('[') {
		return nil, errors.Join(errors.New("not a list"), err)
	}
	var found []element
	for dec.More() {
		var raw json.RawMessage
		if err := dec.Decode(&raw); err != nil {
			return nil, err
		}
		end := int(dec.InputOffset())
		var plugin struct{ Type string }
		if err := json.Unmarshal(raw, &plugin); err != nil {
			return nil, err
		}
		found = append(found, element{end - len(raw), end, plugin.Type == pluginType})
	}
	_, err := dec.Token() // the closing bracket
	return found, err
}

// withEntry returns the conflist with entry as the last of its plugins, in place of any other entry of sluice.
func withEntry(conflist, entry []byte) ([]byte, error) {
	all, err := elements(conflist)
	if err != nil {
		return nil, err
	}
	if n := len(all); n > 0 && all[n-1].ours && count(all) == 1 {
		return splice(conflist, all[n-1].start, all[n-1].end, entry), nil
	}
	if conflist, err = withoutEntry(conflist); err != nil {
		return nil, err
	}
	if all, err = elements(conflist); err != nil {
		return nil, err
	}
	if len(all) == 0 {
		return nil, errors.New(`"plugins" is empty: sluice needs a plugin to chain to`)
	}
	last := all[len(all)-1]
	before := bytes.LastIndexAny(conflist[:last.start], "[,") + 1
	inserted := append([]byte(","), conflist[before:last.start]...) // the white space before the last entry
	return splice(conflist, last.end, last.end, append(inserted, entry...)), nil
}

// withoutEntry returns the conflist without the entries of sluice. It reverses withEntry byte for byte.
func withoutEntry(conflist []byte) ([]byte, error) {
	for {
		all, err := elements(conflist)
		if err != nil {
			return nil, err
		}
		i := len(all) - 1
		for i >= 0 && !all[i].ours {
			i--
		}
		switch {
		case i < 0:
			return conflist, nil
		case i > 0:
			conflist = splice(conflist, all[i-1].end, all[i].end, nil)
		case len(all) > 1:
			conflist = splice(conflist, all[0].start, all[1].start, nil)
		default:
			conflist = splice(conflist, all[0].start, all[0].end, nil)
		}
	}
}

// count counts the entries of sluice.
func count(all []element) (ours int) {
	for _, e := range all {
		if e.ours {
			ours++
		}
	}
	return ours
}

// splice returns text with the bytes from start to end replaced.
func splice(text []byte, start, end int, replacement []byte) []byte {
	return append(append(append([]byte{}, text[:start]...), replacement...), text[end:]...)
}

// fromConf returns the conflist with conf, the configuration of a single plugin, as its only plugin. It has conf's name
// and cniVersion, as the conflist that libcni makes of conf.
func fromConf(conf []byte) ([]byte, error) {
	var c struct {
		CNIVersion json.RawMessage `json:"cniVersion,omitempty"`
		Name       json.RawMessage `json:"name"`
	}
	if err := json.Unmarshal(conf, &c); err != nil {
		return nil, err
	}
	var b bytes.Buffer
	b.WriteString("{\n")
	if c.CNIVersion != nil {
		fmt.Fprintf(&b, "  \"cniVersion\": %s,\n", c.CNIVersion)
	}
	fmt.Fprintf(&b, "  \"name\": %s,\n  \"plugins\": [\n    %s\n  ]\n}\n", c.Name, bytes.TrimSpace(conf))
	return b.Bytes(), nil
}

// validate returns an error if no runtime would load a file of that name with that text.
func validate(name string, text []byte) error {
	if isList(name) {
		if _, err := libcni.ConfListFromBytes(text); err != nil {
			return err
		}
		return checkNothingFollows(text)
	}
	c, err := libcni.ConfFromBytes(text) //nolint:staticcheck // runtimes load these still
	if err != nil {
		return err
	}
	if c.Network.Type == "" || c.Network.Name == "" {
		return errors.New("no type or no name")
	}
	return checkNothingFollows(text)
}

// checkNothingFollows returns an error if anything follows the first JSON value; libcni does not check that.
func checkNothingFollows(text []byte) error {
	dec := json.NewDecoder(bytes.NewReader(text))
	var v json.RawMessage
	if err := dec.Decode(&v); err != nil {
		return err
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return errors.New("unexpected text after the JSON object")
	}
	return nil
}

// errVersion means that the plugin does not serve the CNI version of the network configuration.
var errVersion = errors.New("sluice does not serve its CNI version")

// checkVersion returns errVersion if a runtime may call the plugins of the configuration text with a version that the
// plugin does not serve: every ADD and DEL on the node would fail then. Runtimes take the newest of cniVersions and
// cniVersion that they know themselves, and older ones only know cniVersion. Without one they take 0.1.0 or 0.2.0.
func checkVersion(text []byte) error {
	var keys map[string]json.RawMessage // by their exact names, as runtimes find them
	if err := json.Unmarshal(text, &keys); err != nil {
		return err
	}
	var single string
	var several []string
	for key, v := range map[string]any{"cniVersion": &single, "cniVersions": &several} {
		if raw, ok := keys[key]; ok {
			if err := json.Unmarshal(raw, v); err != nil {
				return fmt.Errorf("%s: %w", key, err)
			}
		}
	}
	served := netconf.Versions
	advice := fmt.Sprintf("set cniVersion to the newest of %s that the runtime and the other plugins support",
		strings.Join(served, ", "))
	switch {
	case single == "":
		return fmt.Errorf("%w: it has no cniVersion; %s", errVersion, advice)
	case !slices.Contains(served, single):
		return fmt.Errorf("%w: cniVersion is %q; %s", errVersion, single, advice)
	}
	for _, v := range several {
		if newer, err := version.GreaterThan(v, served[len(served)-1]); newer || err != nil {
			return fmt.Errorf("%w: cniVersions has %q; remove it from the list, or install a sluice that serves it",
				errVersion, v)
		}
	}
	return nil
}
