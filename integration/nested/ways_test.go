package nested

import (
	"fmt"
	"slices"
	"strings"

	"github.com/sluice-cni/sluice/integration/clients"
	"github.com/sluice-cni/sluice/integration/testbed"
)

// The ways to start a container.
const (
	dockerRun = "docker run"
	classic   = "docker build"
	buildKit  = "docker build, BuildKit"
	buildkitd = "buildkitd"
)

// userDefined is the name of a network.
const userDefined = "ci"

// way is a way to start a container, and the kind of the container.
type way struct {
	program string
	kind    string
	// separate: each client is in a container of its own. Else all are in one.
	separate bool
	// options are arguments of docker run and docker build, and buildctl build.
	options []string
	// user, unless empty, is the user of the steps of a build.
	user string
	// joins: the container is in the network of another one.
	joins bool
	// remapped: dockerd has user namespaces.
	remapped bool
}

// String is for names of tests.
func (w way) String() string { return w.program + ", " + w.kind }

// hostsOptions tells containers of the server, by the program that starts them.
func (w way) hostsOptions(names ...string) (options []string) {
	if w.program == buildkitd {
		const address = "=" + testbed.WorldIPv4
		return []string{"--opt", "add-hosts=" + strings.Join(names, address+",") + address}
	}
	for _, name := range names {
		options = append(options, "--add-host", name+":"+testbed.WorldIPv4)
	}
	return options
}

// The kinds of networks that several programs have.
const (
	bridge      = "bridge"
	userNetwork = "a user-defined network"
	podNetwork  = "the pod's network"
	joined      = "another container's network"
	user        = "user 1000"
	remapped    = "a user namespace"
)

// ways are all ways, in the order of the table.
var ways = []way{
	{program: dockerRun, kind: bridge, separate: true},
	{program: dockerRun, kind: userNetwork, options: []string{"--network", userDefined}},
	{program: dockerRun, kind: podNetwork, options: []string{"--network", "host"}},
	{program: dockerRun, kind: joined, joins: true},
	{program: dockerRun, kind: "read-only", options: []string{"--read-only", "--tmpfs", "/tmp"}},
	{program: dockerRun, kind: user, options: []string{"--user", "1000"}},
	{program: dockerRun, kind: "no capabilities", options: []string{"--cap-drop", "ALL"}},
	{program: dockerRun, kind: remapped, remapped: true},
	{program: classic, kind: bridge, separate: true},
	{program: classic, kind: userNetwork, options: []string{"--network", userDefined}},
	{program: classic, kind: podNetwork, options: []string{"--network", "host"}},
	{program: classic, kind: joined, joins: true},
	{program: classic, kind: user, user: "1000"},
	{program: classic, kind: remapped, remapped: true},
	{program: buildKit, kind: bridge, separate: true},
	{program: buildKit, kind: podNetwork, options: []string{"--network", "host"}},
	{program: buildKit, kind: user, user: "1000"},
	{program: buildKit, kind: remapped, remapped: true},
	{program: buildkitd, kind: bridge, separate: true},
	{program: buildkitd, kind: podNetwork, options: []string{
		"--allow", "network.host", "--opt", "force-network-mode=host",
	}},
	{program: buildkitd, kind: user, user: "1000"},
}

// try runs clients of an image in containers that are started in one way. A build makes an image, and pushes it to the
// registry with this name. Each client has a name of its own for the server: the proxy passes the TLS of a name through
// after clients have refused its certificate.
func (l *lab) try(w way, i image, name string) (outcomes []clients.Outcome, err error) {
	host := "-" + name + ".example.test"
	var hosts []string
	for _, c := range i.clients {
		hosts = append(hosts, c.Label()+host)
	}
	options := slices.Concat(w.hostsOptions(hosts...), w.options)
	if w.joins {
		other, stop, err := l.startOther(w, i, hosts)
		if err != nil {
			return nil, err
		}
		defer stop()
		options = append(slices.Clone(w.options), "--network", "container:"+other)
	}
	out, url := "", "https://*"+host+":443/"
	switch w.program {
	case dockerRun:
		out, err = l.runContainers(w, options, i, url)
	default:
		out, err = l.build(w, l.dockerfile(w, i, url), name, options...)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w\n%s", w, err, out)
	}
	return clients.Outcomes(out)
}

// runContainers runs the clients by docker run, and returns the output of all containers.
func (l *lab) runContainers(w way, options []string, i image, url string) (string, error) {
	var all strings.Builder
	for _, command := range commands(w, i, url) {
		args := append([]string{"run", "--rm"}, options...)
		out, err := run(l.dockerd(w).Command(append(append(args, registryAddress+"/"+i.repository), command...)...))
		all.WriteString(out)
		if err != nil {
			return all.String(), err
		}
	}
	return all.String(), nil
}

// commands are the commands of the containers.
func commands(w way, i image, url string) [][]string {
	if !w.separate {
		return [][]string{{clients.GoFile, clients.RunCommand, url}}
	}
	var each [][]string
	for _, c := range i.clients {
		each = append(each, []string{clients.GoFile, clients.RunCommand, url, c.Name})
	}
	return each
}

// dockerfile is a build whose steps run the clients.
func (l *lab) dockerfile(w way, i image, url string) string {
	text := "FROM " + registryAddress + "/" + i.repository + "\n"
	if w.user != "" {
		text += "USER " + w.user + "\n"
	}
	for _, command := range commands(w, i, url) {
		text += "RUN " + testbed.JSON(command) + "\n"
	}
	return text
}

// build builds an image in one way and pushes it to the registry. It returns the output of the build.
func (l *lab) build(w way, dockerfile, name string, options ...string) (string, error) {
	dir, tag := l.context(dockerfile), registryAddress+"/"+name
	if w.program == buildkitd {
		args := []string{
			"build", "--frontend", "dockerfile.v0", "--local", "context=" + dir, "--local", "dockerfile=" + dir,
			"--no-cache", "--progress", "plain", "--output", "type=image,push=true,name=" + tag,
		}
		return run(l.buildkit.Command(append(args, options...)...))
	}
	args := append([]string{"build", "--no-cache", "--tag", tag}, options...)
	value := "0"
	if w.program == buildKit {
		value, args = "1", append(args, "--progress", "plain")
	}
	cmd := l.dockerd(w).Command(append(args, dir)...)
	cmd.Env = append(cmd.Env, "DOCKER_BUILDKIT="+value)
	out, err := run(cmd)
	if err != nil {
		return out, err
	}
	if pushed, err := run(l.dockerd(w).Command("push", "--quiet", tag)); err != nil {
		return out, fmt.Errorf("pushing the image: %w\n%s", err, pushed)
	}
	return out, nil
}

// startOther starts a container whose network another one can join, with names of the server. stop removes it.
func (l *lab) startOther(w way, i image, hosts []string) (id string, stop func(), err error) {
	args := append([]string{"run", "--detach"}, way{program: dockerRun}.hostsOptions(hosts...)...)
	out, err := run(l.dockerd(w).Command(append(args, registryAddress+"/"+i.repository,
		clients.GoFile, clients.IdleCommand)...))
	if err != nil {
		return "", nil, fmt.Errorf("a container to join: %w\n%s", err, out)
	}
	id = strings.TrimSpace(out)
	return id, func() {
		if out, err := run(l.dockerd(w).Command("rm", "--force", id)); err != nil {
			l.t.Errorf("removing a container: %v\n%s", err, out)
		}
	}, nil
}
