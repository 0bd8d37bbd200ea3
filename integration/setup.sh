#!/usr/bin/env bash
# Installs the Debian or Ubuntu packages that are missing for `make test`, `lint`, `demo`, `bench`, `e2e` or
# `screenshot`.
# Says nothing when nothing is missing.
set -euo pipefail

usage="usage: $0 test|lint|demo|bench|e2e|screenshot"
PATH=$PATH:/usr/sbin:/sbin # where some users do not look

# A line is what must be there, a command or an absolute path, and the package that brings it.
common="
ip                    iproute2
iptables-nft          iptables
iptables-legacy       iptables
nft                   nftables
sysctl                procps
curl                  curl
jq                    jq
python3               python3
/usr/lib/cni/bridge   containernetworking-plugins
"
test="
conntrack             conntrack
openssl               openssl
tcpdump               tcpdump
mitmdump              mitmproxy
/usr/include/stdlib.h libc6-dev
"
bench="
mitmdump              mitmproxy
redsocks              redsocks
iperf3                iperf3
"
e2e="
ip                    iproute2
iptables              iptables
conntrack             conntrack
etcd                  etcd-server
runc                  runc
mitmdump              mitmproxy
/usr/share/doc/busybox-static busybox-static
"
optional=
case ${1-} in
test) wanted=$common$test ;;
lint) wanted="shellcheck shellcheck" ;;
demo) wanted=$common optional="mitmdump mitmproxy" ;;
bench) wanted=$common$bench ;;
e2e) wanted=$e2e ;;
screenshot) wanted=$common$test"chromium chromium" ;;
*) echo "$usage" >&2 && exit 2 ;;
esac

# missing prints the packages for what is not there.
missing() {
    local what package
    while read -r what package; do
        if [[ -n $what ]] && ! command -v "$what" >/dev/null && ! [[ -e $what ]]; then
            echo "$package"
        fi
    done <<<"$1" | sort -u
}

mapfile -t packages < <(missing "$wanted")
mapfile -t extra < <(missing "$optional")
all=("${packages[@]}" "${extra[@]}")
if ((${#all[@]} == 0)); then
    exit 0
fi
if ! command -v apt-get >/dev/null; then
    echo "$0: missing, and there is no apt-get to install it: ${all[*]}" >&2
    exit 1
fi
if ((EUID != 0)); then
    echo "$0: as root: apt-get install --no-install-recommends ${all[*]}" >&2
    exit 1
fi

log=$(mktemp)
policy=/usr/sbin/policy-rc.d
ours=
cleanup() {
    rm -f "$log"
    if [[ -n $ours ]]; then
        rm -f "$policy"
    fi
}
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

# Debian starts a daemon when its package is installed, unless this file says no.
if ! [[ -e $policy ]]; then
    ours=yes
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod 755 "$policy"
fi

# apt is quiet unless it fails.
apt() {
    DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=300 -o Acquire::Retries=3 "$@" >"$log" 2>&1 </dev/null ||
        { cat "$log" >&2 && return 1; }
}

echo "installing ${all[*]}"
apt update
if ((${#packages[@]} > 0)); then
    apt install --no-install-recommends "${packages[@]}"
fi
if ((${#extra[@]} > 0)) && ! apt install --no-install-recommends "${extra[@]}"; then
    echo "not to be had: ${extra[*]}; going on without"
fi
for package in redsocks etcd-server; do
    if [[ " ${packages[*]} " == *" $package "* ]]; then
        # Tests start their own; the service is not wanted, now or after the next boot.
        service "${package%-server}" stop >/dev/null 2>&1 || true
        update-rc.d "${package%-server}" disable >/dev/null 2>&1 || true
    fi
done
