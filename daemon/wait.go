package main

import (
	"context"
	"fmt"
	"net"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/sluice-cni/sluice/daemon/config"
	"github.com/sluice-cni/sluice/plugin/attach"
)

func waitCommand() *cobra.Command {
	var socket, address, onTimeout string
	var timeout time.Duration
	c := &cobra.Command{
		Use:   "wait",
		Short: "Wait until the proxy is ready",
		Long: `wait returns as soon as the proxy (the upstream) is ready. It is for init containers, post-start commands
and scripts that need the proxy before they begin.

It asks the daemon by its unix socket. With --address it connects to the proxy itself, which also works where
the daemon's socket cannot be reached, such as in a container.`,
		Example: `  # Wait for up to five minutes, then fail.
  sluiced wait --timeout 5m

  # In a container: connect to a proxy on the node; go on without it after 30 seconds.
  sluiced wait --address '${HOST_IP}:18080' --timeout 30s --on-timeout proceed`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if onTimeout != "fail" && onTimeout != "proceed" {
				return fmt.Errorf("--on-timeout: %q is not one of fail, proceed", onTimeout)
			}
			check := attach.NewClient(socket).Upstream
			if address != "" {
				address, err := config.Address(address, os.LookupEnv)
				if err != nil {
					return fmt.Errorf("--address: %w", err)
				}
				check = func(ctx context.Context) error { return connect(ctx, address) }
			}
			start := time.Now()
			err := attach.WaitUntil(cmd.Context(), timeout, check)
			waited := time.Since(start).Round(time.Millisecond)
			switch {
			case err == nil:
				fmt.Fprintf(cmd.ErrOrStderr(), "upstream is there, after %s\n", waited)
				return nil
			case cmd.Context().Err() != nil || onTimeout == "fail":
				return fmt.Errorf("gave up after %s: %w", waited, err)
			}
			fmt.Fprintf(cmd.ErrOrStderr(), "proceeding without the upstream after %s: %s\n", waited, err)
			return nil
		},
	}
	socketFlag(c, &socket)
	c.Flags().StringVar(&address, "address", "",
		"`host:port` of the proxy, to connect to it instead of asking the daemon; ${NAME} is replaced by\n"+
			"the environment variable NAME (default: ask the daemon)")
	c.Flags().DurationVar(&timeout, "timeout", time.Minute,
		"longest `duration` to wait, such as 90s or 5m; 0: no limit")
	c.Flags().StringVar(&onTimeout, "on-timeout", "fail",
		"when the timeout has passed: fail ends with exit code 1, proceed with exit code 0")
	return c
}

// connect returns nil if a TCP connection to address can be made.
func connect(ctx context.Context, address string) error {
	var d net.Dialer
	c, err := d.DialContext(ctx, "tcp", address)
	if err != nil {
		return err
	}
	return c.Close()
}
