#!/usr/bin/env bash
# Prints the manifests for `kubectl apply -f`: the namespace, then the chart rendered with its default values. Arguments
# go to `helm template`, such as --set KEY=VALUE. Needs bin/tools/helm (make bin/tools/helm).
set -euo pipefail
cd "$(dirname "$0")/.."
cat <<'END'
# Generated from deploy/chart by `make manifests`. Change the chart, not this file.
apiVersion: v1
kind: Namespace
metadata:
  name: sluice-system
  labels:
    # The daemon uses the host's network and mounts directories of the host.
    pod-security.kubernetes.io/enforce: privileged
END
bin/tools/helm template sluice deploy/chart --namespace sluice-system --kube-version 1.35.0 "$@"
