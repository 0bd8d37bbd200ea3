package trust

import (
	"os"
	"slices"
	"strings"

	"github.com/containerd/nri/pkg/api"
)

// variable is an environment variable that names a file with certificates.
type variable struct {
	name, path string
	// unless is a variable of a container that would lose its effect, if there is one.
	unless string
}

// variables are the variables for clients that read no trust store of the container, or one that is made after the
// container has started. The first two add to a client's own roots. The others replace them: they name the bundle,
// which is the container's own where it has one.
//
// Others are left out on purpose. curl reads SSL_CERT_FILE, pip and botocore read REQUESTS_CA_BUNDLE, so
// CURL_CA_BUNDLE, PIP_CERT and AWS_CA_BUNDLE would add nothing. GIT_SSL_CAINFO and CARGO_HTTP_CAINFO would override a
// setting of the user in git's or cargo's configuration.
var variables = []variable{
	{name: "NODE_EXTRA_CA_CERTS", path: CAPath},                              // Node.js has roots of its own
	{name: "DENO_CERT", path: CAPath},                                        // so has Deno
	{name: "SSL_CERT_FILE", path: BundlePath, unless: "SSL_CERT_DIR"},        // no store; httpx, uv and others
	{name: "REQUESTS_CA_BUNDLE", path: BundlePath, unless: "CURL_CA_BUNDLE"}, // certifi in a new virtual environment
}

// hookSeconds is the time after which the runtime ends the hook. The hook itself ends after a second.
const hookSeconds = 2

// adjustment returns the additions to a container of a wanted pod. Additions that are there already stay: another
// sluiced may have made them, and the runtime does not create a container for which two plugins want the same.
func (t *Trust) adjustment(c *api.Container) *api.ContainerAdjustment {
	adjust, has := &api.ContainerAdjustment{}, environment(c)
	if t.hookFile.isUsable() && !hasHook(c) {
		adjust.AddHooks(&api.Hooks{CreateContainer: []*api.Hook{t.hook(c.GetId(), has)}})
	}
	source := t.files.folder()
	mounted := mountAt(c, MountPath)
	if info, err := os.Stat(source); err != nil || !info.IsDir() {
		return adjust // the runtime would not create the container
	}
	if mounted == nil {
		adjust.AddMount(&api.Mount{
			Destination: MountPath, Type: "bind", Source: source,
			Options: []string{"rbind", "ro", "rprivate", "nosuid", "nodev", "noexec"},
		})
	} else if mounted.GetSource() != source {
		return adjust
	}
	for _, v := range variables {
		_, present := has[v.name]
		_, loses := has[v.unless]
		if !present && !loses && t.files.has(v.path) {
			adjust.AddEnv(v.name, v.path)
		}
	}
	return adjust
}

func (t *Trust) hook(containerID string, has map[string]string) *api.Hook {
	return &api.Hook{
		Path: t.config.Hook,
		Args: append([]string{
			t.config.Hook, hookCommand, "--ca", t.files.caPEM(), "--report", t.files.report(containerID),
			"--bundle", BundlePath,
		}, namedArgs(NamedStores(has))...),
		Env:     []string{"GOMAXPROCS=1"}, // a start with more threads costs more than they gain
		Timeout: api.Int(hookSeconds),
	}
}

func hasHook(c *api.Container) bool {
	return slices.ContainsFunc(c.GetHooks().GetCreateContainer(), func(h *api.Hook) bool {
		return len(h.GetArgs()) > 1 && h.GetArgs()[1] == hookCommand
	})
}

func mountAt(c *api.Container, destination string) *api.Mount {
	for _, m := range c.GetMounts() {
		if m.GetDestination() == destination {
			return m
		}
	}
	return nil
}

// environment returns a container's variables.
func environment(c *api.Container) map[string]string {
	values := make(map[string]string)
	for _, entry := range c.GetEnv() {
		name, value, _ := strings.Cut(entry, "=")
		values[name] = value
	}
	return values
}

// naming are the variables by which an image or a pod names a bundle of its own. SSL_CERT_DIR names directories.
var naming = []string{
	"SSL_CERT_FILE", "SSL_CERT_DIR", "NODE_EXTRA_CA_CERTS", "DENO_CERT", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE",
	"PIP_CERT", "AWS_CA_BUNDLE", "GIT_SSL_CAINFO", "CARGO_HTTP_CAINFO",
}

// maxNamed bounds the stores that a container can name.
const maxNamed = 16

// NamedStores returns the paths that a container's own variables name. Those of ours lead to the mount.
func NamedStores(has map[string]string) []string {
	var paths []string
	for _, name := range naming {
		values := []string{has[name]}
		if name == "SSL_CERT_DIR" {
			values = strings.Split(has[name], ":")
		}
		for _, path := range values {
			if path != "" && !strings.HasPrefix(path, MountPath+"/") && !slices.Contains(paths, path) {
				paths = append(paths, path)
			}
		}
	}
	return paths[:min(len(paths), maxNamed)]
}

func namedArgs(paths []string) []string {
	var args []string
	for _, path := range paths {
		args = append(args, "--named="+path)
	}
	return args
}
