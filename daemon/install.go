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

// entry is our entry of the conflist, as flags give it. What is left out of it is as the plugin has it by default.
type entry struct {
	Type              string          `json:"type"`
	Capabilities      map[string]bool `json:"capabilities"`
	AgentSocket       string          `json:"agentSocket"`
	StateDir          string          `json:"stateDir"`
	IncludeNamespaces []string        `json:"includeNamespaces"`
	ExcludeNamespaces []string        `json:"excludeNamespaces"`
	OnDaemonDown      string          `json:"onDaemonDown"`
	Backend           string          `json:"backend"`

	StatusNeedsUpstream bool `json:"statusNeedsUpstream,omitempty"`
}

// installFlags are the same for every command that installs.
type installFlags struct {
	confDir, binDir, plugin string
	entry                   entry
}

func (f *installFlags) add(c *cobra.Command) {
	defaults, err := netconf.Parse([]byte("{}"))
	if err != nil {
		panic(err) // an empty object is one
	}
	f.paths(c)
	c.Flags().StringVar(&f.plugin, "plugin", "", "the plugin's binary (default: sluice beside this program)")
	c.Flags().StringSliceVar(&f.entry.IncludeNamespaces, "include-namespaces", []string{}, "the only namespaces that sluice asks about; empty for all")
	c.Flags().StringSliceVar(&f.entry.ExcludeNamespaces, "exclude-namespaces", defaults.ExcludeNamespaces, "namespaces that pass through untouched")
	c.Flags().StringVar(&f.entry.OnDaemonDown, "on-daemon-down", defaults.OnDaemonDown, "hold or fail the pods that are added while the daemon is down")
	c.Flags().BoolVar(&f.entry.StatusNeedsUpstream, "status-needs-upstream", false, "keep the node from taking pods while the upstream is late; it must be able to start without the pod network")
	c.Flags().StringVar(&f.entry.Backend, "backend", defaults.Backend, "auto, iptables or nftables")
}

func (f *installFlags) paths(c *cobra.Command) {
	c.Flags().StringVar(&f.confDir, "cni-conf-dir", "/etc/cni/net.d", "where the runtime finds its network configuration")
	c.Flags().StringVar(&f.binDir, "cni-bin-dir", "/opt/cni/bin", "where the runtime finds CNI plugins")
}

// installer checks the flags.
func (f *installFlags) installer(conf config.Config) (i install.Installer, parsed *netconf.Conf, err error) {
	if f.plugin == "" {
		self, err := os.Executable()
		if err != nil {
			return i, nil, fmt.Errorf("--plugin: %w", err)
		}
		f.plugin = filepath.Join(filepath.Dir(self), "sluice")
	}
	e := f.entry
	e.Type, e.Capabilities = "sluice", map[string]bool{netconf.PodAnnotations: true}
	e.AgentSocket, e.StateDir = conf.AgentSocket, conf.StateDir
	data, err := json.Marshal(e)
	if err != nil {
		return i, nil, err
	}
	if parsed, err = netconf.Parse(data); err == nil {
		err = parsed.Validate()
	}
	return install.Installer{ConfDir: f.confDir, BinDir: f.binDir, Plugin: f.plugin, Entry: data, StateDir: conf.StateDir}, parsed, err
}

func installCommand() *cobra.Command {
	var file string
	var flags installFlags
	c := &cobra.Command{
		Use:   "install",
		Short: "Install the plugin on this node, once",
		Long: "install copies the plugin's binary into the CNI bin directory and puts its entry last into the network\n" +
			"configuration that the runtime uses. A single .conf becomes a .conflist. `sluiced run --install` does the\n" +
			"same, and goes on doing it when somebody else changes those files.",
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
		Short: "Take the plugin off this node",
		Long: "uninstall takes sluice's entry out of the network configuration and puts back the file that was there before.\n" +
			"The plugin's binary stays while pods are attached, because their DEL needs it.",
		Args: cobra.NoArgs,
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
				cmd.Printf("uninstalled; the binary stays for the DEL of %d attachments. Run this again when those pods have gone\n", attachments)
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
