// Command sluiced is the node's daemon: it holds the listeners inside the netns of captured pods and relays
// what arrives there to the node's proxy.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"
)

// gitVersion is set when a release is built.
var gitVersion = "dev"

func main() { os.Exit(run()) }

func run() int {
	ctx, stop := signal.NotifyContext(context.Background(), unix.SIGINT, unix.SIGTERM)
	defer stop()
	if err := command().ExecuteContext(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "sluiced:", err)
		return 1
	}
	return 0
}

func command() *cobra.Command {
	root := &cobra.Command{
		Use:   "sluiced",
		Short: "Hold captured pods' connections and relay them to the node's proxy",
		Long: "sluiced holds listening sockets inside the netns of the pods that the sluice CNI plugin captures, and\n" +
			"relays what arrives there to the node's proxy. While the proxy is late, connections wait.",
		Version:           gitVersion,
		SilenceUsage:      true,
		SilenceErrors:     true,
		CompletionOptions: cobra.CompletionOptions{HiddenDefaultCmd: true},
	}
	root.AddCommand(runCommand(), installCommand(), uninstallCommand(), statusCommand(), waitCommand())
	return root
}
