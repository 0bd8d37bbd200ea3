package main

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/sluice-cni/sluice/daemon/authority"
	"github.com/sluice-cni/sluice/daemon/intermediate"
	"github.com/sluice-cni/sluice/daemon/signer"
)

const (
	day = 24 * time.Hour
	// rootLifetime is three years: a root is replaced after a year.
	rootLifetime = 3 * 365 * day
	// intermediateLifetime bounds the time for which a key stolen from a proxy is of use. An intermediate is replaced
	// after a third of it, so two days without the CA do no harm.
	intermediateLifetime = 7 * day
)

func caCommand() *cobra.Command {
	c := &cobra.Command{
		Use:   "ca",
		Short: "Make the certificates with which proxies look into TLS",
		Long: `The CA has one root, which captured pods trust, and an intermediate for the proxy of each node, which is
valid for some days. A proxy signs the certificates of servers with its intermediate. Its key stays with the proxy.

On Kubernetes, "ca serve" has the root, and "ca request" runs beside each proxy. Elsewhere, "ca root" and
"ca issue" make the same as files.`,
	}
	c.AddCommand(caServeCommand(), caRequestCommand(), caRootCommand(), caIssueCommand())
	return c
}

func caServeCommand() *cobra.Command {
	var kubeconfig, account string
	var conf signer.Config
	c := &cobra.Command{
		Use:   "serve",
		Short: "Serve a cluster's CA",
		Long: `serve makes the root of the cluster, keeps it in the Secret sluice-ca, and publishes its certificate in
the ConfigMap sluice-ca. It signs the CertificateSigningRequests of the proxies, each for the node that its token
names, and denies all others.

It never replaces a Secret that exists. If the Secret is damaged, it ends with an error. When a third of the life
of the root has passed, or the Secret gets the annotation sluice.dev/ca-rotate, it makes the next root. That is
published beside the present one for the time of the overlap before it signs.`,
		Example: `  # The proxies are those of the example.
  sluiced ca serve --service-account mitmproxy/mitmproxy

  # They can look into two zones, and no one can forge other names with the key.
  sluiced ca serve --permit-dns example.com,example.org

  # Replace the root, now.
  kubectl -n sluice-system annotate secret sluice-ca sluice.dev/ca-rotate=now`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			namespace, name, found := strings.Cut(account, "/")
			if !found || namespace == "" || name == "" {
				return fmt.Errorf("--service-account: %q is not NAMESPACE/NAME", account)
			}
			conf.Requester = "system:serviceaccount:" + namespace + ":" + name
			if err := errors.Join(authority.Zones(conf.Zones), conf.Times.Check()); err != nil {
				return err
			}
			client, err := newClient(kubeconfig)
			if err != nil {
				return fmt.Errorf("API server: %w", err)
			}
			return signer.New(client, conf, newLog()).Run(cmd.Context())
		},
	}
	kubeconfigFlag(c, &kubeconfig)
	c.Flags().StringVar(&conf.Namespace, "namespace", "sluice-system",
		"`namespace` of the Secret and of the ConfigMap")
	c.Flags().StringVar(&account, "service-account", "mitmproxy/mitmproxy",
		"`namespace/name` of the ServiceAccount of the proxies")
	c.Flags().DurationVar(&conf.Times.Root, "root-lifetime", rootLifetime,
		"`duration` for which a root is valid; the next one is made after a third of it")
	c.Flags().DurationVar(&conf.Times.Intermediate, "lifetime", intermediateLifetime,
		"`duration` for which an intermediate is valid; a proxy requests the next one after a third of it")
	c.Flags().DurationVar(&conf.Times.Overlap, "overlap", day,
		"`duration` for which the next root is published before it signs")
	permitFlag(c, &conf.Zones)
	return c
}

func caRequestCommand() *cobra.Command {
	var kubeconfig string
	var conf intermediate.Config
	c := &cobra.Command{
		Use:   "request --dir DIR",
		Short: "Keep the intermediate of this node's proxy in a folder",
		Long: `request makes a key in a folder, requests an intermediate for it from the CA of the cluster, and writes
both in the form of mitmproxy: mitmproxy-ca.pem and mitmproxy-ca-cert.pem. It requests the next one long before that
ends, and when the CA does not publish its root any more. It tries for ever while the API server or the CA is late. An
intermediate that is in the folder already is used.

Run it in the proxy's pod, before the proxy: mitmproxy makes a CA of its own if its folder has none.`,
		Example: `  sluiced ca request --dir /var/lib/mitmproxy`,
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if conf.Node == "" {
				conf.Node = os.Getenv("NODE_NAME")
			}
			if conf.Node == "" {
				return errors.New("--node: the environment variable NODE_NAME does not name the node either")
			}
			client, err := newClient(kubeconfig)
			if err != nil {
				return fmt.Errorf("API server: %w", err)
			}
			return intermediate.New(client, conf, newLog()).Run(cmd.Context())
		},
	}
	kubeconfigFlag(c, &kubeconfig)
	c.Flags().StringVar(&conf.Node, "node", "",
		"`name` of this node at the API server (default: the environment variable NODE_NAME)")
	c.Flags().StringVar(&conf.Dir, "dir", "", "`folder` for the files: mitmproxy's confdir (required)")
	c.Flags().StringVar(&conf.Namespace, "namespace", "sluice-system",
		"`namespace` of the ConfigMap with the published roots")
	required(c, "dir")
	return c
}

func caRootCommand() *cobra.Command {
	var dir string
	var lifetime time.Duration
	var zones []string
	c := &cobra.Command{
		Use:   "root --dir DIR",
		Short: "Make a root in a folder",
		Long: `root makes a root and writes it into a folder: ca.crt, the certificate that clients are to trust, and
ca.key, its key. It fails if the folder has one: a new root would break every client that trusts the old one.`,
		Example: `  sluiced ca root --dir /etc/sluice/root
  sluiced ca issue --root /etc/sluice/root --dir /var/lib/mitmproxy`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := authority.Zones(zones); err != nil {
				return err
			}
			if err := os.MkdirAll(dir, 0o700); err != nil {
				return err
			}
			root, err := authority.NewRoot(time.Now(), lifetime, zones)
			if err != nil {
				return err
			}
			return root.CreateRoot(dir)
		},
	}
	c.Flags().StringVar(&dir, "dir", "", "`folder` for the files (required)")
	required(c, "dir")
	c.Flags().DurationVar(&lifetime, "lifetime", rootLifetime, "`duration` for which the root is valid")
	permitFlag(c, &zones)
	return c
}

func caIssueCommand() *cobra.Command {
	var root, node, dir string
	var lifetime time.Duration
	c := &cobra.Command{
		Use:   "issue --root DIR --dir DIR",
		Short: "Make an intermediate for a proxy, with a root in a folder",
		Long: `issue makes a key and its intermediate, signed by the root in the folder --root, and writes them into the
folder --dir in the form of mitmproxy: mitmproxy-ca.pem and mitmproxy-ca-cert.pem. It replaces those that are there. Run
it again before the intermediate ends.`,
		Example: `  sluiced ca issue --root /etc/sluice/root --dir /var/lib/mitmproxy --lifetime 720h`,
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			signing, err := authority.ReadRoot(root)
			if err != nil {
				return err
			}
			key, err := authority.NewKey()
			if err != nil {
				return err
			}
			if node == "" {
				node = nodeName()
			}
			chain, err := signing.Issue(node, key.Public(), time.Now(), lifetime)
			if err != nil {
				return err
			}
			return authority.Authority{Chain: chain, Key: key}.WriteMitmproxy(dir)
		},
	}
	c.Flags().StringVar(&root, "root", "", "`folder` with ca.crt and ca.key (required)")
	c.Flags().StringVar(&dir, "dir", "", "`folder` for the files: mitmproxy's confdir (required)")
	required(c, "root", "dir")
	c.Flags().StringVar(&node, "node", "",
		"`name` of the node, in the certificate (default: the environment variable NODE_NAME, or the host's name)")
	c.Flags().DurationVar(&lifetime, "lifetime", intermediateLifetime,
		"`duration` for which the intermediate is valid; it never outlives the root")
	return c
}

// permitFlag adds the flag that limits roots to DNS zones.
func permitFlag(c *cobra.Command, zones *[]string) {
	c.Flags().StringSliceVar(zones, "permit-dns", nil,
		"comma-separated DNS `zones`: of DNS names, a new root is good for those in them alone\n"+
			"(default: all names)")
}

func kubeconfigFlag(c *cobra.Command, path *string) {
	c.Flags().StringVar(path, "kubeconfig", "",
		"`path` of a kubeconfig to reach the API server outside of a pod (default: the pod's service account)")
}

// required marks flags that must be given.
func required(c *cobra.Command, names ...string) {
	for _, name := range names {
		if err := c.MarkFlagRequired(name); err != nil {
			panic(err) // there is no such flag
		}
	}
}

func newLog() *slog.Logger { return slog.New(slog.NewTextHandler(os.Stderr, nil)) }
