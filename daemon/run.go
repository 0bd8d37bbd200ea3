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
	"github.com/sluice-cni/sluice/daemon/optin"
	"github.com/sluice-cni/sluice/daemon/upstream"
	"github.com/sluice-cni/sluice/plugin/attach"
)

func runCommand() *cobra.Command {
	var file string
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
			return serve(cmd.Context(), conf, log)
		},
	}
	c.Flags().StringVar(&file, "config", "/etc/sluice/config.yaml", "configuration file")
	c.Flags().TextVar(&level, "log-level", slog.LevelInfo, "DEBUG, INFO, WARN or ERROR")
	return c
}

// serve runs every part of the daemon until ctx ends or one of them fails.
func serve(ctx context.Context, conf config.Config, log *slog.Logger) error {
	socket, err := agent.Listen(conf.AgentSocket)
	if err != nil {
		return err
	}
	up := upstream.New(conf.Upstream, log)
	decide := func(a attach.Attachment, interfaces []string) (attach.Decision, error) {
		return optin.Decide(conf, a, interfaces)
	}
	agent := agent.New(decide, attach.NewStore(conf.StateDir), up, log)
	// Before the first call is answered: what was captured has its listeners again.
	agent.Reconcile(ctx)
	log.Info("sluiced is up", "version", gitVersion, "agentSocket", conf.AgentSocket,
		"upstream", conf.Upstream.Address, "protocol", string(conf.Upstream.Protocol))

	parts, ctx := errgroup.WithContext(ctx)
	parts.Go(func() error { return up.Run(ctx) })
	parts.Go(func() error { return agent.Run(ctx) })
	parts.Go(func() error { return agent.Serve(ctx, socket) })
	if conf.MetricsAddress != "" {
		parts.Go(func() error { return serveMetrics(ctx, conf.MetricsAddress, agentMetrics(agent)) })
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
