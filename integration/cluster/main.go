// Cluster runs a Kubernetes node on a Linux machine, as root. The node does not run in a container and uses no
// registry: its programs are built from Go modules, and its images from the machine's packages.
//
//	cluster up [--dual-stack] [--dir DIR]           starts a node, and prints the path of the kubeconfig
//	cluster load [--dir DIR] [IMAGE.tar…]           loads images onto the node, from files or standard input
//	cluster image NAME [PATH…] >IMAGE.tar           builds an image: tools, sluice or mitmproxy
//	cluster kind-node ROOT ETCD >IMAGE.tar          builds the image of a kind node, from the root of kind-root.sh
//	cluster exec [--dir DIR] [--world] -- COMMAND…  runs a command on the node
//	cluster down [--dir DIR]                        stops the node and removes its files
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"syscall"

	"github.com/sluice-cni/sluice/integration/cluster/images"
	"github.com/sluice-cni/sluice/integration/cluster/node"
	"github.com/sluice-cni/sluice/integration/cluster/programs"
)

const usage = `usage: cluster up|down|load|image|kind-node|exec [flags] [arguments]`

func main() {
	node.Main()
	os.Exit(run())
}

func run() int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if len(os.Args) < 2 {
		fmt.Fprintln(os.Stderr, usage)
		return 2
	}
	err := command(ctx, os.Args[1], os.Args[2:])
	switch {
	case errors.Is(err, flag.ErrHelp):
		return 2
	case err != nil:
		fmt.Fprintf(os.Stderr, "cluster %s: %v\n", os.Args[1], err)
		return 1
	}
	return 0
}

func command(ctx context.Context, name string, args []string) error {
	var c node.Config
	var world bool
	flags := flag.NewFlagSet("cluster "+name, flag.ContinueOnError)
	flags.StringVar(&c.Dir, "dir", "", "the `folder` of the node's state (default: bin/cluster/node of the repository)")
	switch name {
	case "up":
		flags.BoolVar(&c.DualStack, "dual-stack", false, "give pods and Services IPv6 addresses too")
	case "exec":
		flags.BoolVar(&world, "world", false,
			"run the command in the network outside the node, at "+node.WorldIPv4+" and "+node.WorldIPv6)
	}
	if err := flags.Parse(args); err != nil {
		return err
	}
	if name == "image" {
		return image(flags.Args())
	}
	repository, err := findRepository()
	if err != nil {
		return err
	}
	source, cache := filepath.Join(repository, "integration/cluster"), filepath.Join(repository, "bin/cluster")
	if c.Dir == "" {
		c.Dir = filepath.Join(cache, "node")
	}
	if c.Dir, err = filepath.Abs(c.Dir); err != nil {
		return err
	}
	switch name {
	case "up":
		return up(ctx, c, source, cache)
	case "kind-node":
		return kindNode(ctx, source, cache, flags.Args())
	case "down":
		return node.Down(c)
	case "load":
		return load(ctx, c, flags.Args())
	case "exec":
		return execute(c, world, flags.Args())
	default:
		return errors.New(usage)
	}
}

func up(ctx context.Context, c node.Config, source, cache string) error {
	paths, err := programs.Build(ctx, source, cache, os.Stderr)
	if err != nil {
		return err
	}
	pause, err := images.Pause()
	if err != nil {
		return err
	}
	tar, err := pause.Bytes()
	if err != nil {
		return err
	}
	if err := node.Up(ctx, c, paths, tar, os.Stderr); err != nil {
		return err
	}
	fmt.Println(c.Kubeconfig())
	return nil
}

// load loads images onto the node, from files or from standard input.
func load(ctx context.Context, c node.Config, files []string) error {
	if len(files) == 0 {
		return node.Load(ctx, c, os.Stdin)
	}
	for _, name := range files {
		file, err := os.Open(name)
		if err != nil {
			return err
		}
		err = node.Load(ctx, c, file)
		_ = file.Close() // only read
		if err != nil {
			return fmt.Errorf("loading %s: %w", name, err)
		}
	}
	return nil
}

// execute replaces this process by a command on the node.
func execute(c node.Config, world bool, args []string) error {
	if len(args) == 0 {
		return errors.New("name the command to run")
	}
	argv, env, err := node.Command(c, world, args...)
	if err != nil {
		return err
	}
	path, err := exec.LookPath(argv[0])
	if err != nil {
		return err
	}
	return syscall.Exec(path, argv, env)
}

func image(args []string) error {
	if len(args) == 0 {
		return errors.New("name the image to build: tools, sluice or mitmproxy")
	}
	i, err := images.Named(args[0], args[1:])
	if err != nil {
		return err
	}
	return i.Write(os.Stdout)
}

// kindNode builds the image of a kind node from its root, from the programs of a node, and from etcd.
func kindNode(ctx context.Context, source, cache string, args []string) error {
	if len(args) != 2 {
		return errors.New("name the root of the node and the program etcd")
	}
	paths, err := programs.Build(ctx, source, cache, os.Stderr)
	if err != nil {
		return err
	}
	paths["etcd"] = args[1]
	i, err := images.KindNode(args[0], paths)
	if err != nil {
		return err
	}
	return i.Write(os.Stdout)
}

// findRepository finds the repository's root above the working directory, or above the folder of this program.
func findRepository() (string, error) {
	here, err := os.Getwd()
	if err != nil {
		return "", err
	}
	self, err := os.Executable()
	if err != nil {
		return "", err
	}
	for _, dir := range []string{here, filepath.Dir(self)} {
		for ; dir != "/"; dir = filepath.Dir(dir) {
			if _, err := os.Stat(filepath.Join(dir, "integration/cluster/kube/go.mod")); err == nil {
				return dir, nil
			}
		}
	}
	return "", fmt.Errorf("neither %s nor this program is in sluice's repository", here)
}
