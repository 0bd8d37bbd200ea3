package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/sluice-cni/sluice/daemon/config"
	"github.com/sluice-cni/sluice/daemon/install"
	"github.com/sluice-cni/sluice/plugin/netconf"
)

// entry is the plugin's entry in the conflist, as the flags and the daemon's configuration give it. The plugin has a
// default for every key that is left out.
type entry struct {
	Type              string          `json:"type"`
	Capabilities      map[string]bool `json:"capabilities"`
	AgentSocket       string          `json:"agentSocket"`
	StateDir          string          `json:"stateDir"`
	DataDir           string          `json:"dataDir"`
	IncludeNamespaces []string        `json:"includeNamespaces"`
	ExcludeNamespaces []string        `json:"excludeNamespaces"`
	OnDaemonDown      string          `json:"onDaemonDown"`
	OptIn             string          `json:"optIn"`
	ProvisionalFor    string          `json:"provisionalFor"`
	Backend           string          `json:"backend"`

	StatusNeedsUpstream bool `json:"statusNeedsUpstream,omitempty"`
}

// installFlags are the flags of the commands that install: run and install.
type installFlags struct {
	confDir, binDir, plugin string
	entry                   entry
}

// add adds all flags to c. Their defaults are the plugin's.
func (f *installFlags) add(c *cobra.Command) {
	defaults, err := netconf.Parse([]byte("{}"))
	if err != nil {
		panic(err) // an empty object is always valid
	}
	f.paths(c)
	c.Flags().StringVar(&f.plugin, "plugin", "",
		"`path` of the plugin's binary, which is copied into --cni-bin-dir\n"+
			"(default: the file sluice in the directory of sluiced)")
	c.Flags().StringSliceVar(&f.entry.IncludeNamespaces, "include-namespaces", []string{},
		"comma-separated Kubernetes `namespaces` in which sluice may capture pods; the plugin\n"+
			"passes pods of all others through unchanged (default: all namespaces)")
	c.Flags().StringSliceVar(&f.entry.ExcludeNamespaces, "exclude-namespaces", defaults.ExcludeNamespaces,
		"comma-separated Kubernetes `namespaces` in which the plugin passes pods through\n"+
			"unchanged, without asking the daemon")
	c.Flags().StringVar(&f.entry.OnDaemonDown, "on-daemon-down", defaults.OnDaemonDown,
		"pods that are added while the daemon is down: with hold they start, and their\n"+
			"connections wait for the daemon; with fail they do not start, and the runtime retries")
	c.Flags().StringVar(&f.entry.OptIn, "opt-in", defaults.OptIn,
		"who says whether a new pod opted in: daemon, by labels; or annotation, which the admission\n"+
			"policy of the chart writes, so that a pod that did not opt in needs no daemon to start")
	c.Flags().StringVar(&f.entry.ProvisionalFor, "provisional-for", defaults.ProvisionalFor,
		"how long the TCP of a new pod waits while nobody knows its labels, if nothing in its namespace\n"+
			"was seen to opt in; then it passes uncaptured; 0s: without limit")
	c.Flags().BoolVar(&f.entry.StatusNeedsUpstream, "status-needs-upstream", false,
		"let the plugin's STATUS fail while the proxy is late, so that the runtime reports the node\n"+
			"as not ready and no pods come; the proxy must then start without the pod network\n"+
			"(default: STATUS does not depend on the proxy)")
	c.Flags().StringVar(&f.entry.Backend, "backend", defaults.Backend,
		"how rules are applied in a pod's network namespace: iptables, nftables, or auto, which\n"+
			"prefers iptables where it works")
}

// paths adds the flags with the runtime's directories to c.
func (f *installFlags) paths(c *cobra.Command) {
	c.Flags().StringVar(&f.confDir, "cni-conf-dir", "/etc/cni/net.d",
		"`directory` in which the container runtime looks for its network configuration")
	c.Flags().StringVar(&f.binDir, "cni-bin-dir", "/opt/cni/bin",
		"`directory` in which the container runtime looks for CNI plugins")
}

// installer checks the flags, and returns the installer and the plugin's parsed entry.
func (f *installFlags) installer(conf config.Config) (i install.Installer, parsed *netconf.Conf, err error) {
	if f.plugin == "" {
		self, err := os.Executable()
		if err != nil {
			return i, nil, fmt.Errorf("--plugin: finding the directory of sluiced: %w", err)
		}
		f.plugin = filepath.Join(filepath.Dir(self), "sluice")
	}
	e := f.entry
	e.Type, e.Capabilities = "sluice", map[string]bool{netconf.PodAnnotations: true}
	e.AgentSocket, e.StateDir, e.DataDir = conf.AgentSocket, conf.StateDir, conf.DataDir
	data, err := json.Marshal(e)
	if err != nil {
		return i, nil, err
	}
	if parsed, err = netconf.Parse(data); err == nil {
		err = parsed.Validate()
	}
	return install.Installer{
		ConfDir: f.confDir, BinDir: f.binDir, Plugin: f.plugin, Entry: data, StateDir: conf.StateDir,
	}, parsed, err
}

func installCommand() *cobra.Command {
	var file string
	var flags installFlags
	c := &cobra.Command{
		Use:   "install",
		Short: "Install the plugin on this node, once",
		Long: `install copies the plugin's binary into the CNI bin directory, and adds the plugin's entry to the network
configuration that the container runtime uses, as the last plugin of the chain. Of the configuration of a single
plugin (.conf or .json) it makes a .conflist beside it. Running install again is harmless.

It needs root. The daemon does the same with the flag --install of "sluiced run", and again whenever another
program changes these files.`,
		Example: `  # Install with the defaults: the configuration is /etc/sluice/config.yaml.
  sluiced install

  # Capture pods of two namespaces only; pods there fail to start while the daemon is down.
  sluiced install --include-namespaces ci,dev --on-daemon-down fail`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			conf, err := config.Load(file)
			if err != nil {
				return err
			}
			i, _, err := flags.installer(conf)
			if err != nil {
				return err
			}
			written, err := i.Install()
			for _, path := range written {
				cmd.Println("wrote", path)
			}
			if err == nil && len(written) == 0 {
				cmd.Println("already installed")
			}
			return err
		},
	}
	configFlag(c, &file)
	flags.add(c)
	return c
}

func uninstallCommand() *cobra.Command {
	var file string
	var flags installFlags
	c := &cobra.Command{
		Use:   "uninstall",
		Short: "Remove the plugin from this node",
		Long: `uninstall removes sluice's entry from the network configuration, and a conflist that install made of
another file. A running daemon does not install the plugin again until it is restarted.

The plugin's binary stays while there are pods that it has attached, because the runtime needs it to remove
them. Run uninstall again when these pods are gone. It needs root.`,
		Example: `  sluiced uninstall`,
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			conf, err := config.Load(file)
			if err != nil {
				return err
			}
			i := install.Installer{ConfDir: flags.confDir, BinDir: flags.binDir, StateDir: conf.StateDir}
			attachments, err := i.Uninstall()
			if err != nil {
				return err
			}
			if attachments > 0 {
				cmd.Printf("uninstalled, but the plugin's binary stays: the runtime needs it to remove "+
					"%d attachments. Run this again when their pods are gone\n", attachments)
			} else {
				cmd.Println("uninstalled")
			}
			return nil
		},
	}
	configFlag(c, &file)
	flags.paths(c)
	return c
}
