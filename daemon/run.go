package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/sluice-cni/sluice/daemon/agent"
	"github.com/sluice-cni/sluice/daemon/api"
	"github.com/sluice-cni/sluice/daemon/captured"
	"github.com/sluice-cni/sluice/daemon/config"
	"github.com/sluice-cni/sluice/daemon/endpoint"
	"github.com/sluice-cni/sluice/daemon/install"
	"github.com/sluice-cni/sluice/daemon/kube"
	"github.com/sluice-cni/sluice/daemon/optin"
	"github.com/sluice-cni/sluice/daemon/pause"
	"github.com/sluice-cni/sluice/daemon/proxies"
	"github.com/sluice-cni/sluice/daemon/relay"
	"github.com/sluice-cni/sluice/daemon/unixsock"
	"github.com/sluice-cni/sluice/daemon/upstream"
	"github.com/sluice-cni/sluice/plugin/attach"
	"github.com/sluice-cni/sluice/plugin/ruleset"
)

func runCommand() *cobra.Command {
	var file, kubeconfig, probeSocket string
	var level slog.Level
	var keep bool
	var flags installFlags
	c := &cobra.Command{
		Use:   "run --config FILE",
		Short: "Run the daemon",
		Long: `run serves the plugin, opens listeners in the network namespaces of captured pods, and relays their
connections to the proxy (the upstream), until it gets SIGINT or SIGTERM. If another sluiced runs with the same
agent socket, it takes over that daemon's listeners, with the connections that wait in them.

It needs root, the host's network namespace, and a view of the network namespaces of pods. The configuration file
must have upstream.address (or upstream.podSelector, upstream.service, or the protocol sockets) and capture.source.`,
		Example: `  # A first configuration: capture every attachment, with an HTTP proxy on the node.
  printf 'upstream: {address: "127.0.0.1:18080"}\ncapture: {source: all}\n' > /etc/sluice/config.yaml

  # Run the daemon, install the plugin, and keep it installed.
  sluiced run --install

  # With another configuration, outside of a pod, and with more in the log.
  sluiced run --config /etc/sluice/kube.yaml --kubeconfig /root/.kube/config --log-level DEBUG`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			conf, err := config.Load(file)
			if err != nil {
				return err
			}
			log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: level}))
			installer, namespaces, err := flags.installer(conf)
			if err != nil {
				return err
			}
			d := daemon{
				conf: conf, kubeconfig: kubeconfig, probeSocket: probeSocket, excluded: namespaces.Excluded,
				plugin: filepath.Join(flags.binDir, "sluice"), log: log,
			}
			if keep {
				d.keeper = &install.Keeper{Installer: installer, Log: log}
			}
			return d.run(cmd.Context())
		},
	}
	configFlag(c, &file)
	c.Flags().StringVar(&kubeconfig, "kubeconfig", "", "`path` of a kubeconfig to reach the API server outside of a "+
		"pod; needed only with\ncapture.source kubernetes (default: the pod's service account)")
	c.Flags().BoolVar(&keep, "install", false, "install the plugin on this node, and install it again whenever "+
		"another program undoes\nthat (default: do not install)")
	c.Flags().StringVar(&probeSocket, "probe-socket", "", "`path` of a unix socket at which this process alone "+
		"answers sluiced status --ready and --alive,\neven while another sluiced serves the agent socket "+
		"(default: none)")
	flags.add(c)
	c.Flags().TextVar(&level, "log-level", slog.LevelInfo, "lowest `level` to log: DEBUG, INFO, WARN or ERROR")
	return c
}

func configFlag(c *cobra.Command, file *string) {
	c.Flags().StringVar(file, "config", "/etc/sluice/config.yaml", "`path` of the configuration file (YAML)")
}

// daemon is the arguments of `sluiced run`.
type daemon struct {
	conf        config.Config
	kubeconfig  string
	probeSocket string // empty: none
	excluded    func(namespace string) bool
	plugin      string          // the installed binary
	keeper      *install.Keeper // nil without --install
	log         *slog.Logger
}

// run runs every part of the daemon until ctx ends or one of them fails.
func (d daemon) run(ctx context.Context) error {
	if d.conf.Late.Policy == attach.Direct && d.conf.Late.Timeout == 0 {
		d.log.Warn("late.policy is direct and late.timeout is 0s: connections wait without limit, and none goes direct")
	}
	p, err := d.build()
	if err != nil {
		return err
	}
	stopProbes, err := d.serveProbes(ctx, p.api)
	if err != nil {
		return err
	}
	defer stopProbes()
	if err := d.prepare(&p); err != nil {
		return err
	}
	socket, err := p.agent.Start(ctx, d.conf.AgentSocket)
	if err != nil {
		return errors.Join(err, p.proxySocket.Close())
	}
	d.log.Info("sluiced is up", "version", gitVersion, "agentSocket", d.conf.AgentSocket,
		"upstream", d.conf.Upstream.String(), "protocol", string(d.conf.Upstream.Protocol))

	// The parts run on after the signal, until it is decided whether the daemon leaves the node for good.
	signalled, removed := ctx, false
	ctx, end := context.WithCancel(context.WithoutCancel(ctx))
	defer end()
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error {
		defer end()
		select {
		case <-signalled.Done():
			removed = d.leave(ctx, p)
		case <-ctx.Done():
		}
		return nil
	})
	// Parts that serve other processes end when another daemon has taken over. The relay goes on.
	serving, stopServing := context.WithCancel(ctx)
	defer stopServing()
	group.Go(func() error {
		select {
		case <-p.agent.Succeeded():
			stopServing()
		case <-ctx.Done():
		}
		return nil
	})
	// The upstream is looked for until the last relayed connection ends: kubelet ends a daemon as soon as it has handed
	// over, and connections that it has accepted may still wait.
	relaying, stopRelaying := context.WithCancel(context.WithoutCancel(ctx))
	defer stopRelaying()
	if p.upstream != nil {
		group.Go(func() error { return p.upstream.Run(relaying) })
	}
	if p.node != nil {
		group.Go(func() error { return p.node.Run(relaying) })
		group.Go(func() error { return p.node.KeepTaint(serving, d.conf.TaintAfter, p.api.Summary) })
		if d.keeper != nil {
			group.Go(func() error { return p.node.ReportContest(serving, d.keeper.Contest) })
		}
		group.Go(func() error { return p.node.KeepOptedIn(serving, attach.NewOptedInFile(d.conf.DataDir)) })
	}
	if d.keeper != nil {
		group.Go(func() error { return d.keeper.Run(serving) })
	}
	// The container runtime asks the old daemon of an upgrade until that ends, so that it always asks one.
	group.Go(func() error { return p.trust.run(ctx, serving) })
	group.Go(func() error { return p.api.Serve(serving, socket) })
	if p.serveMetrics != nil {
		group.Go(func() error { return p.serveMetrics(serving) })
	}
	group.Go(func() error { return d.serveProxies(serving, p) })
	group.Go(func() error {
		err := p.agent.Run(ctx)
		stopRelaying()
		if _, ok := os.LookupEnv("KUBERNETES_SERVICE_HOST"); ok && ctx.Err() == nil {
			<-ctx.Done() // if this process ended, kubelet would restart it, and it would take over from its successor
		}
		if err == nil {
			err = errEnded
		}
		return err
	})
	if err := group.Wait(); !errors.Is(err, errEnded) {
		return err
	}
	if removed {
		return d.removeFiles(p.node.Runtime())
	}
	return nil
}

// errEnded ends every part once the agent has ended.
var errEnded = errors.New("the agent has ended")

// parts are the parts of a daemon that run.
type parts struct {
	node     *kube.Node         // nil unless capture.source is kubernetes
	upstream *upstream.Upstream // nil with the protocol sockets
	hub      *proxies.Hub
	trust    *podTrust
	agent    *agent.Agent
	api      *api.API

	proxySocket  *unixsock.Listener
	serveMetrics func(context.Context) error // nil without metricsAddress
}

// prepare does everything that can fail before this daemon takes over from another one, which goes on then.
func (d daemon) prepare(p *parts) (err error) {
	if p.node == nil { // every pod is captured, and none may pass because of an older list
		if err := attach.NewOptedInFile(d.conf.DataDir).Remove(); err != nil {
			return err
		}
	}
	if d.keeper != nil {
		if err := d.keeper.Begin(); err != nil {
			return err
		}
	}
	if d.conf.MetricsAddress != "" {
		if p.serveMetrics, err = p.api.ListenMetrics(d.conf.MetricsAddress); err != nil {
			return err
		}
	}
	p.proxySocket, err = d.bindProxySocket()
	return err
}

// serveProbes answers at the probe socket, if there is one, from before the start until stop. It does not depend on
// other parts: kubelet ends a daemon that does not answer.
func (d daemon) serveProbes(ctx context.Context, a *api.API) (stop func(), err error) {
	if d.probeSocket == "" {
		return func() {}, nil
	}
	l, err := unixsock.Bind("unix", d.probeSocket, d.log)
	if err == nil {
		err = l.Publish()
	}
	if err != nil {
		return nil, fmt.Errorf("probe socket: %w", err)
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := a.ServeProbes(ctx, l); err != nil {
			d.log.Error("probes are not answered", "err", err)
		}
	}()
	return func() {
		cancel()
		<-done
	}, nil
}

func (d daemon) build() (p parts, err error) {
	var labels func(attach.Pod) map[string]string
	if d.conf.Capture.Source == config.Kubernetes {
		if p.node, err = newNode(d.kubeconfig, d.conf, d.log); err != nil {
			return p, err
		}
		labels = p.node.Labels
	}
	// There is a hub even where sluiced relays: a proxy may hold listeners of an earlier daemon, and has to close them.
	p.hub = proxies.New(d.conf.ProxySocket, nodeName(), labels, d.log)
	status, accept, proxyReturn := d.upstream(&p)
	table := endpoint.NewTable(func(s endpoint.Served) endpoint.Acceptor {
		return trusting{accept(s, func() attach.PodTrust { return p.trust.of(s.Records()) }), s.Pod, p.trust}
	}, captured.Policy{Node: d.conf.Capture.ToNode}, d.log)
	orchestrator := newOrchestrator(decider{
		conf: d.conf, resolvers: d.findResolvers(resolvConf), proxies: p.hub.Addresses,
	}, p.node, d.excluded)
	if p.trust, err = newPodTrust(d, p.node, table, p.hub, orchestrator); err != nil {
		return p, err
	}
	p.agent = agent.New(agent.Config{
		Orchestrator: orchestrator,
		Store:        attach.NewStore(d.conf.StateDir),
		Upstream:     status, Table: table, ProxyReturn: proxyReturn, Log: d.log,
	})
	p.api = &api.API{
		Agent: p.agent, Table: table, Upstream: status, Trust: p.trust.status, Runtime: p.trust.Asked,
		Ready: d.ready(p.node, p.agent), Log: d.log,
	}
	if d.keeper != nil {
		p.api.Keeper = d.keeper
	}
	return p, nil
}

// resolvConf has the name servers that kubelet gives the daemon's pod: with its dnsPolicy, those of the cluster.
const resolvConf = "/etc/resolv.conf"

// findResolvers returns the name servers in the file at path, and warns if capture.other needs some and there are none.
func (d daemon) findResolvers(path string) []netip.Addr {
	resolvers, err := optin.Resolvers(path)
	switch {
	case err != nil:
		d.log.Warn("name servers of pods are not known", "err", err)
	case d.conf.Capture.Other == ruleset.OtherDNS && len(resolvers) == 0:
		d.log.Warn("capture.other is dns, and the daemon's resolv.conf has no name server for pods")
	case d.conf.Capture.Other == ruleset.OtherDNS:
		d.log.Info("pods may ask these name servers, and those of their dnsConfig", "resolvers", resolvers)
	}
	return resolvers
}

// upstream returns the two ways to the upstream: proxies that take the listeners, or a relay.
func (d daemon) upstream(p *parts) (
	status agent.Upstream, accept func(endpoint.Served, func() attach.PodTrust) endpoint.Acceptor,
	proxyReturn time.Duration,
) {
	if d.conf.Upstream.Protocol == config.Sockets {
		return p.hub, func(s endpoint.Served, trust func() attach.PodTrust) endpoint.Acceptor {
			return p.hub.For(s, trust)
		}, proxies.ReturnTimeout
	}
	var locate func() (string, error)
	if p.node != nil {
		locate = p.node.Locate
	}
	p.upstream = upstream.New(d.conf.Upstream, locate, d.log)
	if d.conf.Upstream.Protocol == config.Connect {
		secret, err := upstream.Secret(filepath.Dir(d.conf.ProxySocket))
		if err != nil { // connections are more than the names on them
			d.log.Error("proxies cannot tell requests of this daemon from others", "err", err)
		}
		p.upstream.Authenticate(secret)
	}
	r := relay.New(p.upstream, d.log)
	return p.upstream, func(s endpoint.Served, trust func() attach.PodTrust) endpoint.Acceptor {
		return r.For(s, trust)
	}, 0
}

// ready returns the function that says why the daemon is not ready to serve.
func (d daemon) ready(node *kube.Node, a *agent.Agent) func() error {
	return func() error {
		errs := []error{a.Ready()}
		if node != nil {
			errs = append(errs, node.Ready())
		}
		if d.keeper != nil {
			errs = append(errs, d.keeper.Ready())
		}
		return errors.Join(errs...)
	}
}

func (d daemon) bindProxySocket() (*unixsock.Listener, error) {
	l, err := unixsock.BindForGroup("unixpacket", d.conf.ProxySocket, d.log)
	if err != nil {
		return nil, fmt.Errorf("proxySocket: %w", err)
	}
	return l, nil
}

// publishRetry is the time between attempts to put the proxy socket in its place.
const publishRetry = time.Second

// serveProxies serves proxies until ctx ends.
func (d daemon) serveProxies(ctx context.Context, p parts) error {
	l := d.publish(ctx, p.proxySocket)
	if l == nil {
		return nil
	}
	return p.hub.Run(ctx, l, p.agent)
}

// publish puts the proxy socket in its place, or returns nil when ctx ends. The container of a proxy may write in the
// folder of the socket, and so keep the socket from its place. That does not end the daemon, which serves the pods.
func (d daemon) publish(ctx context.Context, l *unixsock.Listener) *unixsock.Listener {
	for said := false; ; said = true {
		var err error
		if l == nil {
			l, err = d.bindProxySocket()
		}
		if err == nil {
			err = l.Publish()
		}
		if err == nil {
			return l
		}
		if !said {
			d.log.Error("proxies cannot connect; trying again", "proxySocket", d.conf.ProxySocket, "err", err)
		}
		if l != nil {
			_ = l.Close() // no proxy has connected
			l = nil
		}
		if pause.For(ctx, publishRetry) != nil {
			return nil
		}
	}
}

// nodeName is the node's name in the API server, or the host's.
func nodeName() string {
	if name := os.Getenv("NODE_NAME"); name != "" {
		return name
	}
	name, err := os.Hostname()
	if err != nil {
		return ""
	}
	return name
}
