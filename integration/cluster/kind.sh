#!/usr/bin/env bash
# Runs the end-to-end tests on a kind cluster of one node, which it makes and deletes. Needs docker and kind.
set -euo pipefail
cd "$(dirname "$0")"
root=$PWD/../..
name=sluice-e2e
trap 'kind delete cluster --name "$name"' EXIT
kind create cluster --name "$name" --config kind.yaml --wait 2m --kubeconfig "$root/bin/kind.kubeconfig"

load() { # what is made here goes to the node by way of docker
	"$root/bin/cluster/cluster" image "$@" >"$root/bin/image.tar"
	kind load image-archive "$root/bin/image.tar" --name "$name"
}
load sluice "$root/bin/sluice" "$root/bin/sluiced"
load mitmproxy
load tools
KUBECONFIG=$root/bin/kind.kubeconfig E2E_ON_NODE="docker exec $name-control-plane sh -c" go test -count=1 -v ./e2e
