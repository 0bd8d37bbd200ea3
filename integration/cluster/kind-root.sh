#!/usr/bin/env bash
# Makes the root of a kind node without programs of Kubernetes, in bin/kind/debian12: a Debian 12 with systemd and the
# files of kind's own base image. Prints nothing if it is there.
set -euo pipefail

name=kind-root
usage="usage: $0 install debian12"
help="Makes the root of a kind node in bin/kind/debian12, as root. This takes minutes."
repository=$(cd "$(dirname "$0")/../.." && pwd)
bin=$repository/bin/kind
# shellcheck source=integration/installer.sh
. "$repository/integration/installer.sh"

# The packages of kind's base image that the tests need, and runc. systemd 258 and newer cannot run on cgroup v1.
packages="systemd conntrack iptables nftables iproute2 ethtool util-linux mount kmod e2fsprogs bash ca-certificates jq
    procps runc"

main() {
    begin "$@"
    : >"$log"
    if [[ -d $bin/debian12 ]]; then return; fi
    if ! can_bootstrap; then
        say "this takes root and debootstrap (integration/setup.sh e2e-kind)" >&2
        exit 1
    fi
    say "making debian12; see $log"
    root=$new/debian12
    make_root >>"$log" 2>&1 & # bash ignores set -e before ||, but not in the background
    wait $! || fail "could not make debian12"
    publish debian12
}

# make_root follows the Dockerfile of kind's base image.
make_root() {
    local all files
    read -rd '' -a all <<<"$packages" || true # the end of the text
    bootstrap bookworm "$root" "${all[@]}"
    files=$(go list -C "$repository/tools/kind" -m -f '{{.Dir}}' sigs.k8s.io/kind)/images/base/files
    cp -r --no-preserve=mode "$files/." "$root"
    chmod 755 "$root"/usr/local/bin/* "$root"/kind/bin/*
    # Only units that kind enables start.
    rm -f "$root"/lib/systemd/system/{multi-user,local-fs,basic}.target.wants/* "$root"/etc/systemd/system/*.wants/* \
        "$root"/lib/systemd/system/sockets.target.wants/*{udev,initctl}* \
        "$root"/lib/systemd/system/sysinit.target.wants/systemd-tmpfiles-setup.service
    echo "ReadKMsg=no" >>"$root/etc/systemd/journald.conf"
    ln -s /usr/lib/systemd/systemd "$root/sbin/init"
    chroot "$root" systemctl enable kubelet containerd undo-mount-hacks
    chroot "$root" systemctl mask systemd-binfmt
    mkdir -p "$root/etc/kubernetes/manifests"
    # A machine may have cgroup v1, and no CAP_SYS_RESOURCE.
    sed -i 's/^KUBELET_EXTRA_ARGS=.*/& --fail-cgroupv1=false/' "$root/etc/default/kubelet"
    sed -i -e "s/restrict_oom_score_adj = false/restrict_oom_score_adj = true/" -e "/base_runtime_spec/d" \
        -e "s,sandbox_image = .*,sandbox_image = \"localhost/pause:node\"," "$root/etc/containerd/config.toml"
}

main "$@"
