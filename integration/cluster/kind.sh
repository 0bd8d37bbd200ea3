#!/usr/bin/env bash
# Runs the end-to-end tests on a kind cluster of two nodes, and tests of integration/ in network namespaces inside a
# node. The cluster is deleted afterwards. If a test fails, its logs are in bin/kind/logs.
#
# On a machine with Docker, kind pulls its image of a node, or KIND_IMAGE. On a machine without it, as root, dockerd
# runs in namespaces of its own, and the image is made from packages and Go modules: no registry is needed.
set -euo pipefail
cd "$(dirname "$0")/../.."
name=sluice-e2e
run=$PWD/bin/kind/run
kubeconfig=$run/kubeconfig
image=${KIND_IMAGE-}
# The version before this one, for the test of an update.
previous=7ac61e869dcbb42fd765cd99c7f23dc1e4970af0
in_network=() # runs a command in the network in which ports of Docker are published

# The packages of tests that a node of kind has all programs for. docker, dockertls, oci and truststore take dockerd or
# roots of images, docs and bench take Go, and mitmproxy and drill have targets of their own.
packages=(cni capture waiting relay handover escape sockets cli)
# Tests of mitmproxy 8.1.1, which is a package of this machine.
others='/^mitmproxy_(connect|socks5)$'

main() {
    trap 'exit 130' INT
    trap 'exit 143' TERM HUP
    mkdir -p "$run"
    if ! docker info >"$run/docker.log" 2>&1; then
        start_docker
        make_image
    fi
    if kind get clusters 2>>"$run/docker.log" | grep -x "$name" >/dev/null; then
        echo "$0: a cluster named $name exists; \`kind delete cluster --name $name\` deletes it" >&2
        exit 1
    fi
    trap 'finish $?' EXIT
    kind create cluster --name "$name" --config integration/cluster/kind.yaml --kubeconfig "$kubeconfig" --wait 3m \
        --retain ${image:+--image "$image"}
    docker cp -L "$name-control-plane:/usr/bin/kubectl" "$run/kubectl" # the commands of the manual need it
    load sluice bin/sluice bin/sluiced
    load_previous
    load mitmproxy bin/mitmproxy/12.3.1
    load tools
    test_cluster
    test_in_node
}

kind() { bin/tools/kind "$@"; }

# load NAME [PATH…] builds an image on this machine and loads it onto the nodes.
load() {
    bin/cluster/cluster image "$@" >"$run/image.tar"
    kind load image-archive "$run/image.tar" --name "$name"
    rm "$run/image.tar"
}

# load_previous builds the image sluice:previous of the version before this one, and loads it onto the nodes.
load_previous() {
    local source=$run/previous
    mkdir -p "$source"
    git archive "$previous" | tar -x -C "$source"
    CGO_ENABLED=0 go build -C "$source" -o "$source/bin/sluice" ./plugin
    CGO_ENABLED=0 go build -C "$source" -o "$source/bin/sluiced" ./daemon
    bin/cluster/cluster image sluice "$source/bin/sluice" "$source/bin/sluiced" | docker load -q
    docker tag sluice:e2e sluice:previous
    kind load docker-image sluice:previous --name "$name"
}

# test_cluster runs the end-to-end tests. They are built first: the network of a dockerd of our own leads nowhere.
test_cluster() {
    go test -C integration/cluster -c -o "$run/e2e.test" ./e2e
    (
        cd integration/cluster/e2e
        KUBECONFIG=$kubeconfig E2E_ON_NODE="docker exec {} sh -c" E2E_RESTART_NODE="docker restart {}" \
            E2E_PREVIOUS="$run/previous/deploy" \
            "${in_network[@]}" "$run/e2e.test" -test.v -test.timeout 30m
    )
}

# test_in_node runs tests of integration/ in the cluster's worker, in which the files that they need have the same paths
# as here. The binaries have no race detector, which takes the C library of this machine.
test_in_node() {
    local node=$name-worker package failed=0
    mkdir -p "$run/tests"
    cp bin/sluice bin/sluiced "$run/tests"
    CGO_ENABLED=0 go build -o "$run/tests/" ./integration/connectproxy
    CGO_ENABLED=0 go build -C integration/cluster/tools -o "$run/cni/" \
        github.com/containernetworking/plugins/plugins/{ipam/host-local,main/bridge,main/loopback,meta/portmap}
    for package in "${packages[@]}"; do
        CGO_ENABLED=0 go test -c -o "$run/tests/$package.test" "./integration/$package"
    done
    docker exec "$node" mkdir -p "$PWD"
    # Of the Debian 13 the parts that its Python needs: a plain user may not read all.
    tar -c go.mod deploy integration "${run#"$PWD/"}/tests" bin/mitmproxy/12.3.1 \
        bin/mitmproxy/debian13/{lib*,usr/lib64,usr/lib/*-linux-gnu,usr/lib/python3*,usr/bin/python3*} |
        docker exec -i "$node" tar -x -C "$PWD"
    docker cp "$run/cni" "$node:/usr/lib/cni"
    for package in "${packages[@]}"; do
        echo "in $node: integration/$package"
        # No program can be started from /tmp in a node.
        docker exec --workdir "$PWD/integration/$package" --env TMPDIR=/var/tmp \
            --env SLUICE_TEST_BINARIES="$run/tests" --env SLUICE_MITMPROXY=12.3.1 "$node" \
            "$run/tests/$package.test" -test.timeout 30m -test.skip "$others" || failed=1
    done
    return "$failed"
}

# start_docker starts dockerd in namespaces of its own. It ends with this script, however that ends.
start_docker() {
    if ((EUID != 0)) || [[ -n $image ]]; then
        echo "$0: Docker does not answer: start it, or run this script as root without KIND_IMAGE" >&2
        exit 1
    fi
    integration/setup.sh e2e-kind
    if ! [[ -e /lib/modules ]]; then modules=none; fi # Docker makes the folders that it mounts
    trap 'stop_docker' EXIT
    export DOCKER_HOST=unix://$run/docker.sock
    local options=(
        --host "$DOCKER_HOST" --data-root "$run/docker" --exec-root /run/docker --pidfile /run/docker.pid
        --exec-opt native.cgroupdriver=cgroupfs --cgroup-parent /sluice-kind
    )
    if dockerd --help | grep -- --oom-score-adjust >/dev/null; then
        options+=(--oom-score-adjust 0) # the default takes CAP_SYS_RESOURCE
    fi
    if ! ((0x$(awk '/^CapBnd/ { print $2 }' /proc/self/status) >> 24 & 1)); then # CAP_SYS_RESOURCE
        options+=(--add-runtime reduced="$PWD/integration/cluster/runc-without-sys-resource.sh")
        options+=(--default-runtime reduced)
    fi
    rm -rf "$run/docker"
    # shellcheck disable=SC2016 # the inner shell expands it
    coproc dockerd {
        exec unshare --mount --pid --fork --kill-child --net sh -euc 'ip link set lo up; exec sh -eu "$@"' - \
            integration/testbed/dockerd.sh /usr/sbin "${options[@]}" >"$run/docker.log" 2>&1
    }
    in_network=(nsenter "--net=/proc/$dockerd_PID/ns/net")
    until docker info >/dev/null 2>&1; do
        if ! kill -0 "$dockerd_PID"; then
            cat "$run/docker.log" >&2
            exit 1
        fi
        sleep 0.2
    done
}

# make_image makes the image of a node, of parts that are made once, and loads it into Docker.
make_image() {
    integration/cluster/kind-root.sh install debian12
    make bin/tools/etcd
    bin/cluster/cluster kind-node bin/kind/debian12 bin/tools/etcd >"$run/node.tar"
    docker load -q -i "$run/node.tar"
    rm "$run/node.tar"
    image=kind-node:e2e
}

# finish STATUS keeps the evidence of a failure, and removes all else.
finish() {
    if (($1 != 0)); then
        rm -rf bin/kind/logs
        kind export logs bin/kind/logs --name "$name" || true # the nodes may not run
        cp "$run/docker.log" bin/kind/logs || true
    fi
    kind delete cluster --name "$name" --kubeconfig "$kubeconfig"
    stop_docker
}

# stop_docker ends the dockerd of our own, if it runs, and removes all files.
stop_docker() {
    if [[ -n ${dockerd_PID-} ]]; then
        local pid=$dockerd_PID lifeline=${dockerd[1]} cgroup cgroups
        exec {lifeline}>&-
        wait "$pid" || true
        mapfile -t cgroups < <(awk '$3 ~ /^cgroup2?$/ { print $2 "/sluice-kind" }' /proc/mounts)
        for cgroup in "${cgroups[@]}"; do
            if [[ -d $cgroup ]]; then
                until find "$cgroup" -depth -type d -exec rmdir {} +; do sleep 0.2; done
            fi
        done
        if [[ -n ${modules-} ]]; then rmdir /lib/modules; fi
    fi
    rm -rf "$run"
}

main
