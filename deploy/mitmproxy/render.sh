#!/usr/bin/env bash
# Prints the manifests of the example mitmproxy for `kubectl apply -f`, with the addon sluice.py in a ConfigMap.
set -euo pipefail
cd "$(dirname "$0")"
cat <<'END'
# Generated from daemonset.yaml and sluice.py by `make manifests`. Change those files, not this one.
END
cat daemonset.yaml
cat <<'END'
---
apiVersion: v1
kind: ConfigMap
metadata:
  name: sluice-addon
  namespace: mitmproxy
data:
  sluice.py: |
END
sed 's/^./    &/' sluice.py
