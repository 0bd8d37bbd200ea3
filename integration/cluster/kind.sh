#!/usr/bin/env bash
# Runs the end-to-end tests on a kind cluster of one node, which this script creates and deletes. Needs Docker and kind;
# kind v0.30 is too old: it cannot load images onto a node whose containerd has a configuration of version 4.
set -euo pipefail
cd "$(dirname "$0")"
root=$PWD/../..
name=sluice-e2e
trap 'kind delete cluster --name "$name"' EXIT
kind create cluster --name "$name" --config kind.yaml --wait 2m --kubeconfig "$root/bin/kind.kubeconfig"

# load NAME [PATH…] builds an image on this machine and loads it onto the node.
load() {
	"$root/bin/cluster/cluster" image "$@" >"$root/bin/image.tar"
	kind load image-archive "$root/bin/image.tar" --name "$name"
}
load sluice "$root/bin/sluice" "$root/bin/sluiced"
load mitmproxy "$root/bin/mitmproxy/12.3.1"
load tools
KUBECONFIG=$root/bin/kind.kubeconfig E2E_ON_NODE="docker exec $name-control-plane sh -c" \
	go test -count=1 -v -timeout 30m ./e2e
