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
		Short: "Wait until the upstream is there",
		Long: "wait returns when the upstream is there: in an init container, a post-start command, or a script.\n" +
			"It asks the daemon, or looks for the upstream itself where the daemon's socket is out of reach.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if onTimeout != "fail" && onTimeout != "proceed" {
				return fmt.Errorf("--on-timeout: %q is not one of fail, proceed", onTimeout)
			}
			look := attach.NewClient(socket).Upstream
			if address != "" {
				address, err := config.Address(address, os.LookupEnv)
				if err != nil {
					return fmt.Errorf("--address: %w", err)
				}
				look = func(ctx context.Context) error { return connect(ctx, address) }
			}
			start := time.Now()
			err := attach.WaitUntil(cmd.Context(), timeout, look)
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
	c.Flags().StringVar(&address, "address", "", "look for the upstream at host:port instead of asking the daemon; ${HOST_IP} and other environment variables are expanded")
	c.Flags().DurationVar(&timeout, "timeout", time.Minute, "how long to wait; 0 for as long as it takes")
	c.Flags().StringVar(&onTimeout, "on-timeout", "fail", "fail, or proceed with success")
	return c
}

func connect(ctx context.Context, address string) error {
	var d net.Dialer
	c, err := d.DialContext(ctx, "tcp", address)
	if err != nil {
		return err
	}
	return c.Close()
}
