package main

import (
	"github.com/spf13/cobra"

	"github.com/sluice-cni/sluice/daemon/config"
)

func checkConfigCommand() *cobra.Command {
	var file string
	c := &cobra.Command{
		Use:   "check-config",
		Short: "Check a configuration file",
		Long: `check-config checks the daemon's configuration file as "sluiced run" does when it starts, and changes
nothing. It prints a line for each error, which names the key and the value, and fails if there is one.

It needs neither root nor a node. Environment variables in upstream.address must be set, as for the daemon.`,
		Example: `  # Check the file of this node.
  sluiced check-config

  # Check a file for Kubernetes, where the manifests set HOST_IP.
  HOST_IP=192.0.2.1 sluiced check-config --config kube.yaml`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if _, err := config.Load(file); err != nil {
				return err
			}
			cmd.Println(file, "is valid")
			return nil
		},
	}
	configFlag(c, &file)
	return c
}
