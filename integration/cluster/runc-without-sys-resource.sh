#!/usr/bin/env bash
# Runs runc without CAP_SYS_RESOURCE in the capabilities of its processes. Docker asks for all capabilities where a
# container is privileged, and runc fails on one that it does not have itself.
set -euo pipefail
previous='' file=''
for argument; do
    case $previous in
    --bundle) file=$argument/config.json ;;
    --process) file=$argument ;;
    esac
    previous=$argument
done
if [[ -n $file ]]; then
    # The file of an exec is the process alone.
    changed=$(jq '(if has("process") then .process.capabilities else .capabilities end) |=
        if . == null then . else map_values(map(select(. != "CAP_SYS_RESOURCE"))) end' "$file")
    cat <<<"$changed" >"$file"
fi
exec runc "$@"
