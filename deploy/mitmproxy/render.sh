#!/usr/bin/env bash
# Prints the manifests of the example mitmproxy for `kubectl apply -f`, with the addon in them.
set -euo pipefail
cd "$(dirname "$0")"
cat <<'END'
# Made from daemonset.yaml and sluice.py by `make manifests`: change it there.
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
