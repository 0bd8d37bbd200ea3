package e2e

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/e2e-framework/pkg/envconf"
)

var (
	// home is the name of the node on which the pods of the tests run.
	home string
	// others are the names of the other nodes.
	others []string
	// apiServerNode is the name of a node on which the API server runs.
	apiServerNode string
	// ownTaints are the taints that the nodes had before the tests, by the name of the node.
	ownTaints map[string][]corev1.Taint
)

// findNodes finds out the nodes of the cluster.
func findNodes(ctx context.Context, c *envconf.Config) error {
	var nodes corev1.NodeList
	if err := client(c).List(ctx, &nodes); err != nil {
		return err
	}
	ownTaints = map[string][]corev1.Taint{}
	for _, n := range nodes.Items {
		ownTaints[n.Name] = n.Spec.Taints
		_, controlPlane := n.Labels["node-role.kubernetes.io/control-plane"]
		if controlPlane {
			apiServerNode = n.Name
		}
		if home == "" && !slices.ContainsFunc(n.Spec.Taints, keepsOff) {
			home = n.Name
		} else {
			others = append(others, n.Name)
		}
	}
	if home == "" {
		return errors.New("every node of the cluster has a taint that keeps ordinary pods off")
	}
	apiServerNode = cmp.Or(apiServerNode, home)
	return nil
}

func keepsOff(t corev1.Taint) bool { return t.Effect != corev1.TaintEffectPreferNoSchedule }

// getNode returns the node home.
func getNode(ctx context.Context, c *envconf.Config) (*corev1.Node, error) {
	var n corev1.Node
	return &n, client(c).Get(ctx, home, "", &n)
}

// onNode is the environment variable with the command that runs a shell command on a node, even while the API server is
// down. The shell command becomes its last argument, and {} in it is the name of the node.
const onNode = "E2E_ON_NODE"

// node runs a shell script on the node home.
func node(ctx context.Context, script string) (string, error) { return nodeNamed(ctx, home, script) }

// nodeNamed runs a shell script on any node.
func nodeNamed(ctx context.Context, name, script string) (string, error) {
	words := strings.Fields(strings.ReplaceAll(os.Getenv(onNode), "{}", name))
	words = append(words, script)
	out, err := exec.CommandContext(ctx, words[0], words[1:]...).CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("on the node %s, %s: %w: %s", name, script, err, out)
	}
	return string(out), nil
}
