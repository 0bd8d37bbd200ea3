#!/usr/bin/env bash
# Prints the manifests for `kubectl apply -f`, as the chart makes them of its own values, and of what the arguments change.
set -euo pipefail
cd "$(dirname "$0")/.."
cat <<'END'
# Made from deploy/chart by `make manifests`: change it there.
apiVersion: v1
kind: Namespace
metadata:
  name: sluice-system
  labels:
    # The daemon uses the host's network and mounts its directories.
    pod-security.kubernetes.io/enforce: privileged
END
bin/tools/helm template sluice deploy/chart --namespace sluice-system --kube-version 1.35.0 "$@"
