#!/usr/bin/env bash
# Shows what sluice does, on a small world made of network namespaces:
#
#   world: a web server ──── node: sluiced, later a proxy ──── pod: curl
#
# The pod is attached by a real CNI chain: bridge, then sluice. Nothing in the machine's own network changes, and
# nothing is left behind. Needs root on Debian or Ubuntu, and Go.
set -euo pipefail
cd "$(dirname "$0")/.."
PATH=$PATH:/usr/sbin:/sbin

node=sluice-demo-$$-node
world=sluice-demo-$$-world
pod=sluice-demo-$$-pod
web4=198.51.100.10
web6=2001:db8::10
dir=      # everything that is written
added=    # not empty once the pod may be attached
cache=    # where cnitool keeps results, if the demo made it
declare -A pids # of what was started here and still runs, by name

bold='' dim='' plain=''
if [[ -t 1 && -z ${NO_COLOR-} && ${TERM-dumb} != dumb ]]; then
    bold=$'\e[1m' dim=$'\e[2m' plain=$'\e[0m'
fi

main() {
    trap cleanup EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM HUP
    prepare
    make_world
    attach_pod
    proxy_is_late
    daemon_is_killed
    both_are_killed
    what_left_the_pod
    step "That was all"
    say "Everything that was made for it is removed now."
}

prepare() {
    if ((EUID != 0)); then
        die "network namespaces are made by root: run this as root"
    fi
    integration/setup.sh demo
    step "Building"
    make -s build bin/connectproxy bin/tools/cnitool
    if ! unshare --net true 2>/dev/null; then
        die "no network namespaces can be made here: a container needs --privileged for that"
    fi
    [[ -e /var/lib/cni ]] || cache=/var/lib/cni
    dir=$(mktemp -d /tmp/sluice-demo.XXXXXX)
}

make_world() {
    step "A world of three network namespaces"
    say "world has a web server at $web4 and $web6; node will run sluiced and, later, a proxy; pod will run curl."
    local ns
    for ns in "$node" "$world" "$pod"; do
        ip netns add "$ns"
        ip -n "$ns" link set lo up
    done
    on "$node" sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1
    ip -n "$node" link add world type veth peer name eth0 netns "$world"
    ip -n "$node" addr add 198.51.100.1/24 dev world
    ip -n "$node" addr add 2001:db8::1/64 dev world nodad
    ip -n "$node" link set world up
    ip -n "$world" addr add "$web4/24" dev eth0
    ip -n "$world" addr add "$web6/64" dev eth0 nodad
    ip -n "$world" link set eth0 up
    ip -n "$world" route add default via 198.51.100.1
    ip -n "$world" -6 route add default via 2001:db8::1

    # What the pod sends out of its own link, by destination port, whatever the node does with it then.
    on "$node" nft -f - <<'NFT'
table inet demo {
	counter web { }
	counter excluded { }
	chain prerouting {
		type filter hook prerouting priority raw - 50
		iifname "cni0" tcp flags & (syn | ack) == syn tcp dport 80 counter name web
		iifname "cni0" tcp flags & (syn | ack) == syn tcp dport 81 counter name excluded
	}
}
NFT

    mkdir "$dir/www" "$dir/net.d"
    echo "hello from the world" >"$dir/www/index.html"
    start web "$world" python3 -m http.server --bind :: --directory "$dir/www" 80
    await "the web server listens" listening "$world" 80

    cat >"$dir/net.d/10-pods.conflist" <<CONFLIST
{
  "cniVersion": "1.0.0",
  "name": "pods",
  "plugins": [
    {
      "type": "bridge", "bridge": "cni0", "isGateway": true,
      "ipam": {
        "type": "host-local", "dataDir": "$dir/ipam",
        "ranges": [[{"subnet": "10.88.0.0/16"}], [{"subnet": "fd00:88::/64"}]],
        "routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}]
      }
    },
    {"type": "sluice", "agentSocket": "$dir/agent.sock", "stateDir": "$dir/state"}
  ]
}
CONFLIST
    cat >"$dir/sluiced.yaml" <<CONFIG
upstream:
  protocol: sockets
capture:
  source: all
  excludePorts: [81]
agentSocket: $dir/agent.sock
stateDir: $dir/state
CONFIG
}

attach_pod() {
    step "The pod is attached, by the CNI chain bridge, sluice"
    say "The node's daemon runs. The plugin asks it, and puts the rules into the pod's netns."
    start_sluiced
    added=yes
    cni add >"$dir/result.json"
    jq -r '"the pod has " + ([.ips[].address] | join(" and "))' "$dir/result.json" | quote
}

proxy_is_late() {
    step "The proxy is late"
    say "No proxy runs. Without sluice, a pod told to use one would get \"connection refused\" now."
    say "curl starts in the pod, without any proxy settings, once over IPv4 and once over IPv6:"
    curl_in_pod v4 "http://$web4/"
    curl_in_pod v6 "http://[$web6]/"
    await "both connections wait" waiting 2
    sleep 2
    show bin/sluiced status --agent-socket "$dir/agent.sock"
    say "Both are connected as far as curl can tell, and wait in the kernel. The web server has seen $(requests) requests."
    start_proxy
    finish_curl v4
    finish_curl v6
    say "The proxy accepted both in the pod's netns itself: it sees the pod's own addresses, and what it says of them is:"
    await "the proxy has logged both requests" proxy_logged 2
    proxy_lines | quote
}

daemon_is_killed() {
    step "The daemon is killed"
    say "kill -9 sluiced. The proxy has the listening sockets, so it goes on:"
    stop sluiced KILL
    curl_in_pod orphaned "http://$web4/"
    finish_curl orphaned
}

both_are_killed() {
    step "The proxy is killed too"
    say "Now nobody listens in the pod's netns any more, and another curl starts:"
    stop proxy KILL
    curl_in_pod again "http://$web4/"
    sleep 2
    running again || die "curl should wait, but it has ended: $(cat "$dir/again.out")"
    show ip netns exec "$pod" ss -tn state syn-sent
    say "It is not refused: the rules in the pod's netns drop its SYN, so the kernel sends it again. Both start again:"
    start_sluiced
    start_proxy
    finish_curl again
    say "The web server has now seen $(requests) requests, all from the node's address, since the proxy runs there:"
    sed -n 's/ - - .*\(".*"\)/ \1/p' "$dir/web.log" | quote
}

what_left_the_pod() {
    step "What left the pod"
    say "The node has counted every SYN that came out of the pod's link. To the web server, from the first moment until now:"
    quote <<<"port 80: $(syns web) SYNs"
    say "Port 81 is excluded in this configuration, so that a connection there does leave, to show that the counter counts:"
    on "$pod" curl -s --noproxy '*' --max-time 5 "http://$web4:81/" || true
    quote <<<"port 81: $(syns excluded) SYN"
    if (($(syns web) != 0 || $(syns excluded) == 0)); then
        die "that is not what it should be: 0 for port 80, and more for port 81"
    fi
}

# What it is made of.

on() { ip netns exec "$@"; }

# cni runs the chain's ADD or DEL for the pod, as a container runtime would.
cni() {
    on "$node" env CNI_PATH="$PWD/bin:/usr/lib/cni" NETCONFPATH="$dir/net.d" \
        CNI_ARGS="IgnoreUnknown=1;K8S_POD_NAMESPACE=default;K8S_POD_NAME=web;K8S_POD_UID=demo" \
        bin/tools/cnitool "$1" pods "/run/netns/$pod"
}

# start NAME NETNS COMMAND… runs a program in the background; what it prints goes to NAME.log.
start() {
    local name=$1
    shift
    ip netns exec "$@" >>"$dir/$name.log" 2>&1 </dev/null & # becomes the program: the pid stays
    pids[$name]=$!
}

running() { kill -0 "${pids[$1]}" 2>/dev/null; }

# stop NAME SIGNAL ends a program that start started.
stop() {
    local pid=${pids[$1]-}
    [[ -n $pid ]] || return 0
    unset "pids[$1]"
    { kill "-$2" "$pid" && wait "$pid"; } 2>/dev/null || true
}

start_sluiced() {
    start sluiced "$node" bin/sluiced run --config "$dir/sluiced.yaml"
    await "sluiced answers" answers
}

start_proxy() {
    local socket=$dir/proxy.sock
    if command -v mitmdump >/dev/null; then
        say "Now the proxy comes: mitmdump -s deploy/mitmproxy/sluice.py"
        start proxy "$node" env HOME="$dir" PYTHONUNBUFFERED=1 mitmdump -s deploy/mitmproxy/sluice.py \
            --set "sluice_socket=$socket" --set server=false --set "confdir=$dir/mitmproxy"
    else
        say "mitmproxy is not to be had here, so the proxy that comes now is a small one of our own, bin/connectproxy."
        start proxy "$node" bin/connectproxy -sockets "$socket"
    fi
}

answers() { bin/sluiced status --agent-socket "$dir/agent.sock" >/dev/null 2>&1; }

waiting() {
    local n
    n=$(bin/sluiced status --json --agent-socket "$dir/agent.sock" | jq '[.attachments[].waiting] | add')
    [[ $n == "$1" ]]
}

listening() { [[ -n $(ip netns exec "$1" ss -Hltn "sport = :$2") ]]; }

# The line of a request: mitmdump's own, or the one that connectproxy logs.
proxy_lines() { grep -E -A1 ': GET http|accepted from' "$dir/proxy.log" | grep -v '^--'; }
proxy_logged() { (($(grep -cE ' << .*200|accepted from' "$dir/proxy.log") >= $1)); }

requests() { grep -c GET "$dir/web.log" || true; }

syns() { on "$node" nft --json list counter inet demo "$1" | jq '.nftables[] | .counter // empty | .packets'; }

# curl_in_pod NAME URL runs curl in the pod, in the background.
curl_in_pod() {
    printf '  %s$ curl %s &%s\n' "$dim" "$2" "$plain"
    ip netns exec "$pod" curl -sS -g --noproxy '*' --max-time 60 -o "$dir/$1.body" \
        -w "HTTP %{http_code} after %{time_total} s" "$2" >"$dir/$1.out" 2>&1 </dev/null &
    pids[$1]=$!
}

finish_curl() {
    local status=0
    wait "${pids[$1]}" || status=$?
    unset "pids[$1]"
    ((status == 0)) || die "curl failed: $(cat "$dir/$1.out")"
    echo "$(cat "$dir/$1.out"): $(cat "$dir/$1.body")" | quote
}

# await WHAT COMMAND… tries until it succeeds.
await() {
    local what=$1 n
    shift
    for ((n = 0; n < 200; n++)); do
        if "$@"; then return; fi
        sleep 0.1
    done
    die "it never happened: $what"
}

step() { printf '\n%s%s%s\n' "$bold" "$*" "$plain"; }
say() { printf '%s\n' "$*" | fold -s -w 100 | sed 's/ $//'; }
quote() { sed "s/^/  | /"; }
show() {
    printf '  %s$ %s%s\n' "$dim" "$*" "$plain"
    "$@" | quote
}

die() {
    printf '\ndemo: %s\n' "$*" >&2
    local log
    for log in sluiced proxy; do
        if [[ -s $dir/$log.log ]]; then
            printf -- '--- %s.log\n' "$log" >&2
            tail -n 20 "$dir/$log.log" >&2
        fi
    done
    exit 1
}

cleanup() {
    trap '' INT TERM HUP
    set +e
    local name
    if [[ -n $added ]]; then
        cni del >/dev/null 2>&1
    fi
    for name in "${!pids[@]}"; do
        stop "$name" KILL
    done
    for name in "$pod" "$world" "$node"; do
        [[ -e /run/netns/$name ]] && ip netns del "$name"
    done
    [[ -n $cache ]] && rmdir "$cache/results" "$cache" 2>/dev/null
    rm -rf "$dir"
}

main
