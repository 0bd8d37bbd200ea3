package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/sluice-cni/sluice/daemon/agent"
	"github.com/sluice-cni/sluice/daemon/config"
	"github.com/sluice-cni/sluice/daemon/upstream"
	"github.com/sluice-cni/sluice/plugin/attach"
)

func runCommand() *cobra.Command {
	var file, kubeconfig string
	var level slog.Level
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
			return serve(cmd.Context(), conf, kubeconfig, log)
		},
	}
	c.Flags().StringVar(&file, "config", "/etc/sluice/config.yaml", "configuration file")
	c.Flags().StringVar(&kubeconfig, "kubeconfig", "", "how to reach the API server, outside of a pod (with capture.source: kubernetes)")
	c.Flags().TextVar(&level, "log-level", slog.LevelInfo, "DEBUG, INFO, WARN or ERROR")
	return c
}

// serve runs every part of the daemon until ctx ends or one of them fails.
func serve(ctx context.Context, conf config.Config, kubeconfig string, log *slog.Logger) error {
	source := everything(conf)
	var locate func() (string, error)
	var run []func(context.Context) error
	if conf.Capture.Source == config.Kubernetes {
		node, err := newNode(kubeconfig, conf, log)
		if err != nil {
			return err
		}
		source, locate = labelled{node, conf}, node.Locate
		run = append(run, node.Run)
	}
	socket, err := agent.Listen(conf.AgentSocket)
	if err != nil {
		return err
	}
	up := upstream.New(conf.Upstream, locate, log)
	agent := agent.New(source, attach.NewStore(conf.StateDir), up, log)
	// Before the first call is answered: what was captured has its listeners again.
	agent.Reconcile(ctx)
	log.Info("sluiced is up", "version", gitVersion, "agentSocket", conf.AgentSocket,
		"upstream", conf.Upstream.String(), "protocol", string(conf.Upstream.Protocol))

	run = append(run, up.Run, agent.Run, func(ctx context.Context) error { return agent.Serve(ctx, socket) })
	if conf.MetricsAddress != "" {
		run = append(run, func(ctx context.Context) error { return serveMetrics(ctx, conf.MetricsAddress, agentMetrics(agent)) })
	}
	parts, ctx := errgroup.WithContext(ctx)
	for _, part := range run {
		parts.Go(func() error { return part(ctx) })
	}
	return parts.Wait()
}

func agentMetrics(a *agent.Agent) *prometheus.Registry {
	r := prometheus.NewRegistry()
	r.MustRegister(agent.Metrics{Agent: a}, collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return r
}

func serveMetrics(ctx context.Context, address string, from prometheus.Gatherer) error {
	l, err := net.Listen("tcp", address)
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
