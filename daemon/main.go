// Command sluiced is the daemon of a node. It opens listeners in the netns of the pods that the sluice CNI plugin
// captures, and relays the connections that arrive there to the node's proxy (the upstream). Its commands run the
// daemon, install and uninstall the plugin, and ask a running daemon for its status.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"runtime"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"
)

// gitVersion is set by the linker when a release is built.
var gitVersion = "dev"

// init keeps the first thread for main. Threads that enter the namespaces of pods end with their goroutines, but Go
// never ends the first one. If such a goroutine ran on it, /proc/PID/ns would show a pod's namespaces, and exec probes
// of kubelet would run there.
func init() { runtime.LockOSThread() }

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
		Long: `sluiced is the daemon of sluice, which redirects the TCP connections of pods to a proxy on their node.

It opens listening sockets in the network namespaces of the pods that the sluice CNI plugin captures, and
relays the connections that arrive there to the proxy. While the proxy is late (not started yet, or
restarting), connections wait and are not refused.

Start it as root on a node, with a configuration file:  sluiced run --config FILE --install
See the state of the proxy and of each pod:             sluiced status`,
		Version:           gitVersion,
		SilenceUsage:      true,
		SilenceErrors:     true,
		CompletionOptions: cobra.CompletionOptions{HiddenDefaultCmd: true},
	}
	root.AddCommand(runCommand(), checkConfigCommand(), installCommand(), uninstallCommand(), statusCommand(),
		waitCommand(), caCommand())
	return root
}
