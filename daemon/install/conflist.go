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

// value is a JSON value in a text, which begins at the byte offset start and ends before end.
type value struct {
	json.RawMessage
	start, end int
}

// element is one entry of a list of plugins.
type element struct {
	value
	ours bool // it is sluice's
}

// Conflists are edited by the offsets of values and never marshalled again, so that everything else in them (unknown
// keys, number formats, white space) stays as it was written.

// root is the value of a whole text.
func root(text []byte) value {
	trimmed := bytes.TrimLeft(text, " \t\r\n")
	return value{trimmed, len(text) - len(trimmed), len(text)}
}

// members returns the keys and values of the object v, in their order.
func (v value) members() (keys []string, values []value, err error) {
	dec := json.NewDecoder(bytes.NewReader(v.RawMessage))
	if t, err := dec.Token(); err != nil || t != json.Delim('{') {
		return nil, nil, errors.Join(errors.New("not a JSON object"), err)
	}
	for dec.More() {
		key, err := dec.Token()
		if err != nil {
			return nil, nil, err
		}
		member, err := v.next(dec)
		if err != nil {
			return nil, nil, err
		}
		keys, values = append(keys, key.(string)), append(values, member)
	}
	return keys, values, nil
}

// items returns the values of the list v.
func (v value) items() (values []value, err error) {
	dec := json.NewDecoder(bytes.NewReader(v.RawMessage))
	if t, err := dec.Token(); err != nil || t != json.Delim('[') {
		return nil, errors.Join(errors.New("not a list"), err)
	}
	for dec.More() {
		item, err := v.next(dec)
		if err != nil {
			return nil, err
		}
		values = append(values, item)
	}
	_, err = dec.Token() // the closing bracket
	return values, err
}

// next reads the next value from dec, which reads v.
func (v value) next(dec *json.Decoder) (value, error) {
	var raw json.RawMessage
	if err := dec.Decode(&raw); err != nil {
		return value{}, err
	}
	end := v.start + int(dec.InputOffset())
	return value{raw, end - len(raw), end}, nil
}

// elements finds the entries of the top-level "plugins".
func elements(text []byte) (found []element, err error) {
	keys, values, err := root(text).members()
	if err != nil {
		return nil, err
	}
	i := lastIndex(keys, "plugins") // if there are two lists, libcni takes the last
	if i < 0 {
		return nil, errors.New(`it has no "plugins"`)
	}
	if found, err = values[i].elements(); err != nil {
		return nil, fmt.Errorf(`"plugins": %w`, err)
	}
	return found, nil
}

func lastIndex(keys []string, key string) int {
	for i, k := range slices.Backward(keys) {
		if k == key {
			return i
		}
	}
	return -1
}

// elements returns the entries of a list of plugins.
func (v value) elements() (found []element, err error) {
	items, err := v.items()
	if err != nil {
		return nil, err
	}
	for _, item := range items {
		var plugin struct{ Type string }
		if err := json.Unmarshal(item.RawMessage, &plugin); err != nil {
			return nil, err
		}
		found = append(found, element{item, plugin.Type == pluginType})
	}
	return found, nil
}

// pluginLists finds every "plugins" in v, those of Multus's delegates included: Multus copies the conflist of another
// plugin into its own configuration, with an entry of sluice that is in it.
func (v value) pluginLists() (found [][]element) {
	var inner []value
	switch {
	case bytes.HasPrefix(v.RawMessage, []byte("{")):
		keys, values, _ := v.members() // the text was parsed before
		for i, key := range keys {
			if key != "plugins" {
				continue
			}
			if list, err := values[i].elements(); err == nil {
				found = append(found, list)
			}
		}
		inner = values
	case bytes.HasPrefix(v.RawMessage, []byte("[")):
		inner, _ = v.items()
	}
	for _, w := range inner {
		found = append(found, w.pluginLists()...)
	}
	return found
}

// withEntry returns the conflist with entry as the last of its plugins, in place of any other entry of sluice.
func withEntry(conflist, entry []byte) ([]byte, error) {
	all, err := elements(conflist)
	if err != nil {
		return nil, err
	}
	if n := len(all); n > 0 && all[n-1].ours && count(conflist) == 1 {
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

// withoutEntry returns the configuration without the entries of sluice. It reverses withEntry byte for byte.
func withoutEntry(conf []byte) ([]byte, error) {
	if !json.Valid(conf) {
		return nil, errors.New("it is not valid JSON")
	}
	for {
		ours := firstOurs(conf)
		if ours == nil {
			return conf, nil
		}
		all, i := ours.list, ours.index
		switch {
		case i > 0:
			conf = splice(conf, all[i-1].end, all[i].end, nil)
		case len(all) > 1:
			conf = splice(conf, all[0].start, all[1].start, nil)
		default:
			conf = splice(conf, all[0].start, all[0].end, nil)
		}
	}
}

// position is that of an entry of sluice in its list.
type position struct {
	list  []element
	index int
}

// firstOurs finds an entry of sluice: the last one of the first list that has one.
func firstOurs(conf []byte) *position {
	for _, list := range root(conf).pluginLists() {
		for i, e := range slices.Backward(list) {
			if e.ours {
				return &position{list, i}
			}
		}
	}
	return nil
}

// count counts the entries of sluice.
func count(conf []byte) (ours int) {
	for _, list := range root(conf).pluginLists() {
		for _, e := range list {
			if e.ours {
				ours++
			}
		}
	}
	return ours
}

// splice returns text with the bytes from start to end replaced.
func splice(text []byte, start, end int, replacement []byte) []byte {
	return append(append(append([]byte{}, text[:start]...), replacement...), text[end:]...)
}

// keys are those of a network configuration that make a conflist of it, as they are written.
type keys struct {
	Type       string          `json:"type"`
	CNIVersion json.RawMessage `json:"cniVersion"`
	Name       json.RawMessage `json:"name"`
	Source     string          `json:"sluice.dev/source"`
}

// fromConf returns the conflist with conf, the configuration of a single plugin, as its only plugin. It has conf's name
// and cniVersion, as the conflist that libcni makes of conf; where conf has none, those of outer. A source, unless it
// is empty, is a key beside them.
func fromConf(conf []byte, outer keys, source string) ([]byte, error) {
	k := outer
	if err := json.Unmarshal(conf, &k); err != nil {
		return nil, err
	}
	var b bytes.Buffer
	b.WriteString("{\n")
	if k.CNIVersion != nil {
		fmt.Fprintf(&b, "  \"cniVersion\": %s,\n", k.CNIVersion)
	}
	if source != "" {
		fmt.Fprintf(&b, "  \"sluice.dev/source\": %q,\n", source)
	}
	fmt.Fprintf(&b, "  \"name\": %s,\n  \"plugins\": [\n    %s\n  ]\n}\n", k.Name, bytes.TrimSpace(conf))
	return b.Bytes(), nil
}

// copiesDelegate tells whether conf is the configuration of Multus alone with the network of every pod copied into it,
// as the first of its "delegates".
func copiesDelegate(conf []byte) bool {
	var multus struct {
		Type      string
		Delegates []json.RawMessage
	}
	return json.Unmarshal(conf, &multus) == nil && multus.Type == "multus" && len(multus.Delegates) > 0
}

// withDelegateEntry returns conf, of which copiesDelegate is true, with entry as the last plugin of the first delegate.
func withDelegateEntry(conf, entry []byte) ([]byte, error) {
	names, values, err := root(conf).members()
	if err != nil {
		return nil, err
	}
	i := lastIndex(names, "delegates")
	if i < 0 {
		return nil, errors.New(`it has no "delegates"`)
	}
	delegates, err := values[i].items()
	if err != nil {
		return nil, fmt.Errorf(`"delegates": %w`, err)
	}
	first := delegates[0]
	list := []byte(first.RawMessage)
	if _, err := elements(list); err != nil { // it is a single plugin
		var outer keys
		if err := json.Unmarshal(conf, &outer); err != nil {
			return nil, err
		}
		if list, err = fromConf(list, outer, ""); err != nil {
			return nil, err
		}
	}
	if err := checkVersion(list); err != nil {
		return nil, fmt.Errorf(`"delegates": %w`, err)
	}
	if list, err = withEntry(list, entry); err != nil {
		return nil, fmt.Errorf(`"delegates": %w`, err)
	}
	return splice(conf, first.start, first.end, bytes.TrimSpace(list)), nil
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
