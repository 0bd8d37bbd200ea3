package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/sluice-cni/sluice/daemon/agent"
	"github.com/sluice-cni/sluice/daemon/config"
	"github.com/sluice-cni/sluice/daemon/gate"
	"github.com/sluice-cni/sluice/daemon/install"
	"github.com/sluice-cni/sluice/daemon/kube"
	"github.com/sluice-cni/sluice/daemon/proxies"
	"github.com/sluice-cni/sluice/daemon/relay"
	"github.com/sluice-cni/sluice/daemon/unixsock"
	"github.com/sluice-cni/sluice/daemon/upstream"
	"github.com/sluice-cni/sluice/plugin/attach"
)

func runCommand() *cobra.Command {
	var file, kubeconfig string
	var level slog.Level
	var keep bool
	var flags installFlags
	c := &cobra.Command{
		Use:   "run --config FILE",
		Short: "Run the daemon",
		Args:  cobra.NoArgs,
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
			d := daemon{conf: conf, kubeconfig: kubeconfig, excluded: namespaces.Excluded, log: log}
			if keep {
				d.keeper = &install.Keeper{Installer: installer, Log: log}
			}
			return d.run(cmd.Context())
		},
	}
	configFlag(c, &file)
	c.Flags().StringVar(&kubeconfig, "kubeconfig", "", "how to reach the API server, outside of a pod (with capture.source: kubernetes)")
	c.Flags().BoolVar(&keep, "install", false, "install the plugin on this node, and keep it installed")
	flags.add(c)
	c.Flags().TextVar(&level, "log-level", slog.LevelInfo, "DEBUG, INFO, WARN or ERROR")
	return c
}

func configFlag(c *cobra.Command, file *string) {
	c.Flags().StringVar(file, "config", "/etc/sluice/config.yaml", "configuration file")
}

// daemon is what `sluiced run` was told.
type daemon struct {
	conf       config.Config
	kubeconfig string
	excluded   func(namespace string) bool
	keeper     *install.Keeper // nil unless it is to install
	log        *slog.Logger
}

// run runs every part of the daemon until ctx ends or one of them fails.
func (d daemon) run(ctx context.Context) error {
	conf, log := d.conf, d.log
	if conf.Late.Policy == attach.Direct && conf.Late.Timeout == 0 {
		log.Warn("late.policy is direct, and late.timeout is 0s: connections wait without limit, and none goes direct")
	}
	var node *kube.Node // nil unless the API server is asked
	var ready []func() error
	if conf.Capture.Source == config.Kubernetes {
		var err error
		if node, err = newNode(d.kubeconfig, conf, log); err != nil {
			return err
		}
		ready = append(ready, node.Ready)
	}
	if d.keeper != nil {
		ready = append(ready, d.keeper.Ready)
	}
	hub := d.newHub(node)
	source := everything(conf, hub.Addresses)
	if node != nil {
		source = labelled{node, conf, d.excluded, func() []netip.Addr { return append(node.Proxies(), hub.Addresses()...) }}
	}
	up := d.newWay(node, hub)
	a := agent.New(source, attach.NewStore(conf.StateDir), up, up.accept, log)
	a.Returning = up.returning
	a.Ready = func() error {
		var errs []error
		for _, ask := range ready {
			errs = append(errs, ask())
		}
		return errors.Join(errs...)
	}
	socket, err := begin(ctx, a, conf.AgentSocket)
	if err != nil {
		return err
	}
	log.Info("sluiced is up", "version", gitVersion, "agentSocket", conf.AgentSocket,
		"upstream", conf.Upstream.String(), "protocol", string(conf.Upstream.Protocol))

	group, ctx := errgroup.WithContext(ctx)
	// What serves others ends when another daemon has taken over; what relays goes on.
	serving, retire := context.WithCancel(ctx)
	defer retire()
	group.Go(func() error {
		select {
		case <-a.Retired():
			retire()
		case <-ctx.Done():
		}
		return nil
	})
	// What relays needs to know where the upstream is, to the end: kubelet tells a daemon to end as soon as it has
	// handed over, and what it has accepted may wait still.
	relaying, relayed := context.WithCancel(context.WithoutCancel(ctx))
	defer relayed()
	group.Go(func() error { return up.run(relaying) })
	if node != nil {
		group.Go(func() error { return node.Run(relaying) })
		group.Go(func() error { return node.KeepTaint(serving, conf.TaintAfter, a.Summary) })
	}
	if d.keeper != nil {
		group.Go(func() error { return d.keeper.Run(serving) })
	}
	group.Go(func() error { return a.Serve(serving, socket) })
	if conf.MetricsAddress != "" {
		group.Go(func() error { return serveMetrics(serving, conf.MetricsAddress, agentMetrics(a), log) })
	}
	group.Go(func() error { return serveProxies(serving, hub, conf.ProxySocket, a) })
	group.Go(func() error {
		err := a.Run(ctx)
		relayed()
		if _, in := os.LookupEnv("KUBERNETES_SERVICE_HOST"); in && ctx.Err() == nil {
			<-ctx.Done() // kubelet would start it again, to take over from its successor
		}
		if err == nil {
			err = errEnded
		}
		return err
	})
	if err := group.Wait(); !errors.Is(err, errEnded) {
		return err
	}
	return nil
}

// way is the way to the upstream: through a relay, or without one.
type way struct {
	agent.Upstream
	accept func(attach.NetnsID, attach.Pod, []netip.Addr) agent.Acceptor
	run    func(context.Context) error
	// returning is how long proxies may take to come back with their listeners.
	returning time.Duration
}

func (d daemon) newWay(node *kube.Node, hub *proxies.Hub) way {
	if d.conf.Upstream.Protocol == config.Sockets {
		r := relay.New(nil, d.log) // of what goes direct only
		return way{
			hub,
			func(id attach.NetnsID, pod attach.Pod, ips []netip.Addr) agent.Acceptor {
				return handedOut{hub.For(id, pod, ips), r.For(pod, ips)}
			},
			func(context.Context) error { return nil },
			proxies.Returning,
		}
	}
	var locate func() (string, error)
	if node != nil {
		locate = node.Locate
	}
	up := upstream.New(d.conf.Upstream, locate, d.log)
	r := relay.New(up, d.log)
	return way{
		up,
		func(_ attach.NetnsID, pod attach.Pod, ips []netip.Addr) agent.Acceptor { return r.For(pod, ips) },
		up.Run,
		0,
	}
}

// handedOut is a pod whose listeners proxies have. What goes direct, none of them carries.
type handedOut struct {
	*proxies.Pod
	direct *relay.Pod
}

// Direct implements agent.Acceptor.
func (h handedOut) Direct(ctx context.Context, g *gate.Gate, l *gate.Listener, conn *net.TCPConn, went func(error)) {
	h.direct.Direct(ctx, g, l, conn, went)
}

// newHub makes the place where proxies come for sockets. It is there where sluiced relays too, for proxies that have
// some from a daemon that did not: they are to let go of them.
func (d daemon) newHub(node *kube.Node) *proxies.Hub {
	var labels func(attach.Pod) map[string]string
	if node != nil {
		labels = node.Labels
	}
	return proxies.New(d.conf.ProxySocket, nodeName(), labels, d.log)
}

func serveProxies(ctx context.Context, hub *proxies.Hub, path string, a *agent.Agent) error {
	l, err := unixsock.Listen("unixpacket", path)
	if err != nil {
		return fmt.Errorf("proxySocket: %w", err)
	}
	return hub.Run(ctx, l, a)
}

// nodeName is the node's name as the API server has it, or the host's.
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

// errEnded ends every part when the agent has.
var errEnded = errors.New("the agent has ended")

// begin takes the gates over from the daemon before this one, brings up what was captured, and listens on the agent
// socket. Before the first call is answered, every gate is served again.
func begin(ctx context.Context, a *agent.Agent, path string) (net.Listener, error) {
	taken, err := a.TakeOver(path)
	if err != nil {
		return nil, err
	}
	a.Begin(ctx)
	if err := taken(); err != nil {
		return nil, fmt.Errorf("taking over from the sluiced before this one: %w", err)
	}
	return a.Listen(path)
}

func agentMetrics(a *agent.Agent) *prometheus.Registry {
	r := prometheus.NewRegistry()
	r.MustRegister(agent.Metrics{Agent: a}, collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return r
}

// takeoverTime is how long a daemon that has handed over takes to leave its port, at most. One that hangs does not, and
// capture is not to depend on that.
const takeoverTime = 5 * time.Second

func serveMetrics(ctx context.Context, address string, from prometheus.Gatherer, log *slog.Logger) error {
	l, err := net.Listen("tcp", address)
	said := time.AfterFunc(takeoverTime, func() { log.Error("metrics are not served: the port is in use; trying on", "metricsAddress", address) })
	defer said.Stop()
	for errors.Is(err, unix.EADDRINUSE) {
		select {
		case <-time.After(50 * time.Millisecond):
		case <-ctx.Done():
			return nil
		}
		l, err = net.Listen("tcp", address)
	}
	said.Stop()
	if err != nil {
		return fmt.Errorf("metricsAddress: %w", err)
	}
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(from, promhttp.HandlerOpts{}))
	s := &http.Server{Handler: mux, ReadTimeout: 5 * time.Second, WriteTimeout: 10 * time.Second}
	stop := context.AfterFunc(ctx, func() { _ = s.Close() }) // a scrape more or less
	defer stop()
	if err := s.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serving metrics: %w", err)
	}
	return nil
}
