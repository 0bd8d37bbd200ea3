#!/usr/bin/env bash
# Installs the Debian or Ubuntu packages that a make target needs and that are missing, and the target's version of
# mitmproxy. Prints nothing if nothing is missing.
set -euo pipefail

usage="usage: $0 test|test-mitmproxy|trust-table|lint|demo|bench|e2e|e2e-kind|screenshot"
PATH=$PATH:/usr/sbin:/sbin # the PATH of an ordinary user lacks these folders

# Each line: a command or an absolute path that must exist, and the package that contains it.
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
/usr/include/stdlib.h libc6-dev
dockerd               docker.io
runc                  runc
/usr/share/doc/busybox-static busybox-static
squid                 squid
tinyproxy             tinyproxy-bin
haproxy               haproxy
danted                dante-server
microsocks            microsocks
nginx                 nginx-light
/usr/lib/nginx/modules/ngx_stream_module.so libnginx-mod-stream
"
bench="
redsocks              redsocks
haproxy               haproxy
iperf3                iperf3
runc                  runc
"
e2e="
ip                    iproute2
iptables              iptables
conntrack             conntrack
etcd                  etcd-server
runc                  runc
/usr/share/doc/busybox-static busybox-static
"
# A machine without Docker gets dockerd, and makes the image of a node.
kind="
dockerd               docker.io
jq                    jq
"
# Debian's mitmproxy takes the place of a newer one where PyPI cannot be reached.
mitmproxy="
/usr/share/doc/python3-venv python3-venv
mitmdump              mitmproxy
"
debian13="
debootstrap           debootstrap
/usr/share/keyrings/debian-archive-keyring.gpg debian-archive-keyring
"
lint="
shellcheck            shellcheck
/usr/share/doc/python3-venv python3-venv
"
optional='' version=''
case ${1-} in
test) wanted=$common$test$mitmproxy version="default 8.1.1" ;;
test-mitmproxy) wanted=$common$test$mitmproxy$debian13 ;;
trust-table) wanted=$common$test$mitmproxy$debian13 version=default ;;
lint) wanted=$lint ;;
demo) wanted=$common"openssl openssl" optional=$mitmproxy version=default ;;
bench) wanted=$common$bench$mitmproxy$debian13 version="default 8.1.1 12.3.1" ;;
e2e) wanted=$e2e$debian13 version=12.3.1 ;;
e2e-kind) wanted=$e2e$kind$debian13 version=12.3.1 ;;
screenshot) wanted=$common$test$debian13"chromium chromium" version=12.3.1 ;;
-h | --help)
    echo "$usage"
    echo "Installs the Debian or Ubuntu packages that the make target needs and that are missing, as root, and the"
    echo "target's versions of mitmproxy into bin/mitmproxy/."
    exit 0
    ;;
*) echo "$usage" >&2 && exit 2 ;;
esac

# missing LINES prints the packages whose command or path does not exist.
missing() {
    local needed package
    while read -r needed package; do
        if [[ -n $needed ]] && ! command -v "$needed" >/dev/null && ! [[ -e $needed ]]; then
            echo "$package"
        fi
    done <<<"$1" | sort -u
}

# install_mitmproxy installs the target's versions of mitmproxy.
install_mitmproxy() {
    local versions
    read -ra versions <<<"$version"
    if ((${#versions[@]} > 0)); then
        "$(dirname "$0")/mitmproxy.sh" install "${versions[@]}"
    fi
}

# The tests pass the frames of bridges to iptables, as nodes of Kubernetes do.
if [[ $1 == test* ]] && ! [[ -e /proc/sys/net/bridge ]] && ((EUID == 0)); then
    modprobe br_netfilter
fi

mapfile -t packages < <(missing "$wanted")
mapfile -t extra < <(missing "$optional")
all=("${packages[@]}" "${extra[@]}")
if ((${#all[@]} == 0)); then
    install_mitmproxy
    exit 0
fi
if ! command -v apt-get >/dev/null; then
    echo "$0: these Debian packages are missing, and apt-get is not available to install them: ${all[*]}" >&2
    exit 1
fi
if ((EUID != 0)); then
    echo "$0: packages are missing; run as root: apt-get install --no-install-recommends ${all[*]}" >&2
    exit 1
fi

log=$(mktemp)
policy=/usr/sbin/policy-rc.d
policy_created=
cleanup() {
    rm -f "$log"
    if [[ -n $policy_created ]]; then
        rm -f "$policy"
    fi
}
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

# Debian starts a daemon when its package is installed, unless this program exits with 101.
if ! [[ -e $policy ]]; then
    policy_created=yes
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod 755 "$policy"
fi

# apt runs apt-get, and prints its output only if it fails.
apt() {
    local options=(-qq -o DPkg::Lock::Timeout=300 -o Acquire::Retries=3)
    if ! DEBIAN_FRONTEND=noninteractive apt-get "${options[@]}" "$@" >"$log" 2>&1 </dev/null; then
        cat "$log" >&2
        return 1
    fi
}

echo "installing ${all[*]}"
apt update
if ((${#packages[@]} > 0)); then
    apt install --no-install-recommends "${packages[@]}"
fi
if ((${#extra[@]} > 0)) && ! apt install --no-install-recommends "${extra[@]}"; then
    echo "could not install ${extra[*]}, which is optional; continuing without it"
fi
for package in redsocks etcd-server docker.io squid haproxy dante-server nginx-light; do
    if [[ " ${packages[*]} " == *" $package "* ]]; then
        # The tests start their own instance. The system service must not run, now or after the next boot.
        case $package in
        dante-server) service=danted ;;
        *) service=${package%%[-.]*} ;;
        esac
        service "$service" stop >/dev/null 2>&1 || true
        update-rc.d "$service" disable >/dev/null 2>&1 || true
    fi
done
install_mitmproxy
