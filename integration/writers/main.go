// Command writers runs the parts of other projects that write CNI network configurations, as these projects build them
// into their agents. The tests in integration/conflist have sluiced live beside them. It has a module of its own, so
// that sluice does not depend on theirs. The entrypoint of the thin Multus is a program by itself: a tool of the
// module.
package main

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"sync"

	"github.com/cilium/cilium/daemon/cmd/cni"
	"github.com/cilium/cilium/pkg/option"
	"github.com/cilium/hive"
	"github.com/cilium/hive/cell"
	"golang.org/x/sys/unix"
	"gopkg.in/k8snetworkplumbingwg/multus-cni.v4/pkg/server/config"
)

const usage = "usage: writers cilium|cilium-exclusive|multus DIRECTORY"

func main() { os.Exit(run()) }

func run() int {
	ctx, stop := signal.NotifyContext(context.Background(), unix.SIGINT, unix.SIGTERM)
	defer stop()
	if err := write(ctx, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "writers:", err)
		return 1
	}
	return 0
}

// write runs a writer in a directory of network configurations until ctx ends.
func write(ctx context.Context, args []string) error {
	if len(args) != 2 {
		return fmt.Errorf("%d arguments; %s", len(args), usage)
	}
	switch dir := args[1]; args[0] {
	case "cilium":
		return cilium(ctx, dir, false)
	case "cilium-exclusive":
		return cilium(ctx, dir, true)
	case "multus":
		return multus(ctx, dir)
	}
	return fmt.Errorf("unknown writer %q; %s", args[0], usage)
}

// cilium runs Cilium's manager of network configurations.
func cilium(ctx context.Context, dir string, exclusive bool) error {
	log := slog.New(slog.NewTextHandler(os.Stderr, nil))
	h := hive.New(cni.Cell,
		cell.Provide(func() *option.DaemonConfig { return &option.DaemonConfig{} }),
		cell.Invoke(func(cni.CNIConfigManager) {}))
	hive.AddConfigOverride(h, func(c *cni.Config) {
		c.CNIExclusive, c.WriteCNIConfWhenReady = exclusive, filepath.Join(dir, "05-cilium.conflist")
	})
	if err := h.Start(log, ctx); err != nil {
		return fmt.Errorf("starting Cilium's manager: %w", err)
	}
	<-ctx.Done()
	if err := h.Stop(log, context.WithoutCancel(ctx)); err != nil {
		return fmt.Errorf("stopping Cilium's manager: %w", err)
	}
	return nil
}

// multus runs the manager of network configurations of the thick Multus. It removes its file at its end.
func multus(ctx context.Context, dir string) error {
	manager, err := config.NewManager(config.MultusConf{
		CNIVersion: "0.3.1", Name: config.MultusDefaultNetworkName, Type: "multus-shim",
		Capabilities: map[string]bool{}, CniConfigDir: dir, MultusAutoconfigDir: dir,
	})
	if err != nil {
		return fmt.Errorf("making Multus' manager: %w", err)
	}
	var running sync.WaitGroup
	if err := manager.Start(ctx, &running); err != nil {
		return fmt.Errorf("starting Multus' manager: %w", err)
	}
	running.Wait()
	return nil
}
