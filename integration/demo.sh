#!/usr/bin/env bash
# Demonstrates sluice in network namespaces:
#
#   pods: curl ──── node: sluiced, later a proxy ──── world: a web server
#
# A real CNI chain, bridge and then sluice, adds the pods. The machine's own network does not change, and the demo
# removes everything that it creates. Needs root on Debian or Ubuntu, and Go.
set -euo pipefail
cd "$(dirname "$0")/.."
PATH=$PATH:/usr/sbin:/sbin

node=sluice-demo-$$-node
world=sluice-demo-$$-world
pod=sluice-demo-$$-web
equipped=sluice-demo-$$-equipped
plain_pod=sluice-demo-$$-plain
site=www.example.test # the name of the web server in its certificate
web4=198.51.100.10
web6=2001:db8::10
dir=            # all files of the demo
added=()        # the netns for which CNI ADD has begun
inspects=       # not empty if the proxy looks into TLS
cache=          # the folder in which cnitool stores results, if it did not exist before
steps=0         # number of steps so far
declare -A pids # of the running programs of the demo, by name

bold='' dim='' plain=''
if [[ -t 1 && -z ${NO_COLOR-} && ${TERM-dumb} != dumb ]]; then
    bold=$'\e[1m' dim=$'\e[2m' plain=$'\e[0m'
fi

main() {
    trap cleanup EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM HUP
    introduce
    build
    create_network
    add_pod
    start_proxy_late
    kill_daemon
    kill_daemon_and_proxy
    inspect_https
    count_bypassing_connections
    step "Done"
    say "Every captured connection has gone through the proxy, however late it was. No connection was refused, and" \
        "none went around the proxy. The demo now removes its namespaces, processes and files." \
        "README.md says how to install sluice in a cluster."
}

introduce() {
    printf '%ssluice demo: a pod starts before the proxy of its node%s\n' "$bold" "$plain"
    say "sluice redirects the pod's TCP connections in the kernel, before the pod's first process starts. While the" \
        "proxy is late, the connections wait. They are not refused, and they do not go around the proxy."
}

build() {
    if ((EUID != 0)); then
        die "creating network namespaces needs root: run the demo as root"
    fi
    integration/setup.sh demo
    step "Build sluice"
    make -s build bin/connectproxy bin/tools/cnitool
    if ! unshare --net true 2>/dev/null; then
        die "this machine does not allow network namespaces; in a container, the demo needs --privileged"
    fi
    [[ -e /var/lib/cni ]] || cache=/var/lib/cni
    dir=$(mktemp -d /tmp/sluice-demo.XXXXXX)
}

create_network() {
    step "Create a network of namespaces"
    quote <<END
pods           node                       world
curl ───────── sluiced, later a proxy ─── web server on $web4 and $web6
END
    local ns
    for ns in "$node" "$world" "$pod" "$equipped" "$plain_pod"; do
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

    # Counts the SYNs that leave the pod through its link, by destination port, before the node filters or routes them.
    on "$node" nft -f - <<'NFT'
table inet demo {
	counter web { }
	counter excluded { }
	chain prerouting {
		type filter hook prerouting priority raw - 50
		iifname "cni0" tcp flags & (syn | ack) == syn tcp dport { 80, 443 } counter name web
		iifname "cni0" tcp flags & (syn | ack) == syn tcp dport 81 counter name excluded
	}
}
NFT

    mkdir "$dir/www" "$dir/net.d" "$dir/mitmproxy"
    echo "hello from the world" | tee "$dir/www/index.html" "$dir/www/private" "$dir/www/other" >/dev/null
    start web "$world" python3 -m http.server --bind :: --directory "$dir/www" 80
    serve_https
    await "the web server listens" listening "$world" 80
    await "the web server listens" listening "$world" 443

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
    {
      "type": "sluice", "agentSocket": "$dir/agent.sock", "stateDir": "$dir/state", "dataDir": "$dir/data",
      "capabilities": {"io.kubernetes.cri.pod-annotations": true}
    }
  ]
}
CONFLIST
    cat >"$dir/sluiced.yaml" <<CONFIG
upstream:
  protocol: sockets
capture:
  source: all
  excludePorts: [81]
trust: {caFile: $dir/ca.crt, nriSocket: $dir/none.sock}
agentSocket: $dir/agent.sock
stateDir: $dir/state
dataDir: $dir/data
CONFIG
}

# serve_https serves the same pages by TLS, with a certificate of a CA that stands for the public ones.
serve_https() {
    openssl req -x509 -newkey rsa:2048 -nodes -keyout "$dir/web.key" -out "$dir/web.crt" -days 1 \
        -subj "/CN=a public CA" -addext "subjectAltName=DNS:$site" 2>/dev/null
    start https "$world" python3 -c '
import functools, http.server, ssl, sys
address, dir = sys.argv[1:]
handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=dir + "/www")
server = http.server.ThreadingHTTPServer((address, 443), handler)
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain(dir + "/web.crt", dir + "/web.key")
server.socket = context.wrap_socket(server.socket, server_side=True)
server.serve_forever()' "$web4" "$dir"
}

add_pod() {
    step "Add the pod to the network"
    say "sluiced, the daemon, runs on the node. The CNI plugins bridge and sluice run for the pod, as a container" \
        "runtime runs them. The sluice plugin asks sluiced, and installs the redirect rules in the pod's netns."
    bin/sluiced ca root --dir "$dir/root" >/dev/null
    bin/sluiced ca issue --root "$dir/root" --dir "$dir/mitmproxy" --node demo >/dev/null
    start_sluiced
    cni add "$pod" >"$dir/result.json"
    jq -r '"the pod has the addresses " + ([.ips[].address] | join(" and "))' "$dir/result.json" | quote
}

start_proxy_late() {
    step "The proxy is late"
    say "No proxy runs yet. A pod that uses a proxy through http_proxy would get \"connection refused\" now." \
        "In the captured pod, curl starts without any proxy settings, over IPv4 and over IPv6:"
    curl_in_pod v4 "http://$web4/"
    curl_in_pod v6 "http://[$web6]/"
    await "both connections wait" waiting 2
    sleep 2
    show bin/sluiced status --agent-socket "$dir/agent.sock"
    say "For curl, both connections are established. They wait in the kernel, and the web server has received" \
        "$(requests) requests."
    start_proxy
    finish_curl v4
    finish_curl v6
    say "The proxy has accepted both connections in the pod's netns, so it sees the pod's own addresses. Its log:"
    await "the proxy has logged both requests" proxy_logged 2
    proxy_lines | quote
}

kill_daemon() {
    step "The daemon dies"
    say "kill -9 sluiced. The proxy holds the listening sockets too, so it still accepts connections:"
    stop sluiced KILL
    curl_in_pod orphaned "http://$web4/"
    finish_curl orphaned
}

kill_daemon_and_proxy() {
    step "The proxy dies too"
    say "kill -9 the proxy as well. Now no process listens in the pod's netns. Another curl starts:"
    stop proxy KILL
    curl_in_pod again "http://$web4/"
    sleep 2
    running again || die "curl should wait, but it has ended: $(cat "$dir/again.out")"
    show ip netns exec "$pod" ss -tn state syn-sent
    say "The connection is not refused: the rules in the pod's netns drop its SYN, so the kernel sends the SYN again." \
        "sluiced starts again."
    start_sluiced
    start_proxy
    finish_curl again
    say "The web server has received $(requests) requests by now. All came from the address of the node, where the" \
        "proxy runs:"
    sed -n 's/ - - .*\(".*"\)/ \1/p' "$dir/web.log" | quote
}

inspect_https() {
    step "HTTPS"
    if [[ -z $inspects ]]; then
        say "Without mitmproxy, no proxy looks into TLS here: this step is left out."
        return
    fi
    say "The proxy has a CA of its own. On a cluster, the container runtime runs the hook sluice ca-hook for each" \
        "container of a captured pod. The hook adds the CA to the container's trust stores. There is no container" \
        "runtime here: the demo makes a container's root, runs the hook on it, and gives the pod the annotation" \
        "sluice.dev/tls: inspect. The web server's certificate is by \"a public CA\". curl gets another one:"
    cp "$dir/root/ca.crt" "$dir/ca.crt"
    await "sluiced has the CA" grep -q "the proxy's CA has changed" "$dir/sluiced.log"
    cni add "$equipped" '{"sluice.dev/tls": "inspect"}' >/dev/null
    curl_https "$equipped" hook private
    await "the proxy has logged the request" grep -q "GET https://$site/private" "$dir/proxy.log"
    say "The proxy has read the request:"
    grep "GET https://$site/private" "$dir/proxy.log" | quote
    say "The container of another captured pod is not given the CA. The proxy passes its TLS through:"
    cni add "$plain_pod" >/dev/null
    curl_https "$plain_pod" nothing other
    await "the proxy has logged the connection" grep -q 'TLS passed through' "$dir/proxy.log"
    say "The proxy has seen the name and the size, and no request:"
    grep -o 'sluice: TLS passed through.*' "$dir/proxy.log" | quote
    if grep -q "GET https://$site/other" "$dir/proxy.log"; then
        die "the proxy has read the request of the other pod"
    fi
}

count_bypassing_connections() {
    step "No connection went around the proxy"
    say "The node counts every SYN that leaves the pods. SYNs from the pods to the web server so far:"
    quote <<<"ports 80 and 443: $(syns web) SYNs"
    say "Port 81 is excluded from capture in this configuration. A connection to it leaves the pod, which shows that" \
        "the counter works:"
    on "$pod" curl -s --noproxy '*' --max-time 5 "http://$web4:81/" || true
    quote <<<"port 81: $(syns excluded) SYN"
    if (($(syns web) != 0 || $(syns excluded) == 0)); then
        die "wrong number of SYNs: want 0 to ports 80 and 443, and at least 1 to port 81"
    fi
}

# Helpers.

on() { ip netns exec "$@"; }

# cni VERB NETNS [ANNOTATIONS] runs ADD or DEL of the CNI chain for a pod, as a container runtime does.
cni() {
    [[ $1 == del ]] || added+=("$2")
    on "$node" env CNI_PATH="$PWD/bin:/usr/lib/cni" NETCONFPATH="$dir/net.d" \
        CAP_ARGS="{\"io.kubernetes.cri.pod-annotations\": ${3:-{\}}}" \
        CNI_ARGS="IgnoreUnknown=1;K8S_POD_NAMESPACE=default;K8S_POD_NAME=${2##*-};K8S_POD_UID=${2##*-}" \
        bin/tools/cnitool "$1" pods "/run/netns/$2"
}

# curl_https NETNS WORK PAGE runs curl in a container of a pod, and prints the page and the issuer of the certificate.
# The container's root is an overlay over this machine's, in a mount namespace that ends with curl. The work before is
# `hook` or `nothing`.
curl_https() {
    local url=https://$site/$3
    printf '  %s$ curl %s%s\n' "$dim" "$url" "$plain"
    # shellcheck disable=SC2016 # bash expands it
    unshare --mount bash -euc '
        dir=$1 netns=$2 work=$3 site=$4 ip=$5 url=$6
        bundle=$dir/container
        mkdir -p "$bundle"
        mount -t tmpfs tmpfs "$bundle"
        mkdir "$bundle/upper" "$bundle/work" "$bundle/rootfs"
        mount -t overlay overlay -o "lowerdir=/,upperdir=$bundle/upper,workdir=$bundle/work" "$bundle/rootfs"
        cat "$dir/web.crt" >>"$bundle/rootfs/etc/ssl/certs/ca-certificates.crt"
        if [[ $work == hook ]]; then
            echo "{\"root\": {\"path\": \"rootfs\"}}" >"$bundle/config.json"
            bin/sluice ca-hook --ca "$dir/ca.crt" <<<"{\"ociVersion\": \"1.2.0\", \"bundle\": \"$bundle\"}"
        fi
        ip netns exec "$netns" chroot "$bundle/rootfs" curl -sSv --noproxy "*" --max-time 60 \
            --resolve "$site:443:$ip" "$url"' bash "$dir" "$1" "$2" "$site" "$web4" "$url" >"$dir/https.out" 2>&1 ||
        die "curl failed: $(cat "$dir/https.out")"
    sed -n 's/^\* *\(issuer: \)/\1/p; /^hello/p' "$dir/https.out" | quote
}

# start NAME NETNS COMMAND… runs a program in the background. Its output goes to NAME.log.
start() {
    local name=$1
    shift
    ip netns exec "$@" >>"$dir/$name.log" 2>&1 </dev/null & # ip execs the program, which keeps the PID
    pids[$name]=$!
}

running() { kill -0 "${pids[$1]}" 2>/dev/null; }

# stop NAME SIGNAL ends a program that `start` has started.
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
    local socket=$dir/proxy.sock mitmdump
    if mitmdump=$(PATH=$PWD/bin/mitmproxy/default:$PATH command -v mitmdump); then
        say "The proxy starts: mitmdump -s deploy/mitmproxy/sluice.py"
        inspects=yes
        start proxy "$node" env HOME="$dir" PYTHONUNBUFFERED=1 "$mitmdump" -s deploy/mitmproxy/sluice.py \
            --set "sluice_socket=$socket" --set server=false --showhost --set "confdir=$dir/mitmproxy" \
            --set "ssl_verify_upstream_trusted_ca=$dir/web.crt"
    else
        say "The proxy starts. mitmproxy is not available on this machine, so a small proxy of this repository" \
            "takes its place: bin/connectproxy -sockets"
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

# The log lines of requests: mitmdump logs two for each, connectproxy one.
proxy_lines() { grep -E -A1 ': GET http|accepted from' "$dir/proxy.log" | grep -v '^--'; }
proxy_logged() { (($(grep -cE ' << .*200|accepted from' "$dir/proxy.log") >= $1)); }

requests() { grep -c GET "$dir/web.log" || true; }

syns() { on "$node" nft --json list counter inet demo "$1" | jq '.nftables[] | .counter // empty | .packets'; }

# curl_in_pod NAME URL runs curl in the pod, in the background.
curl_in_pod() {
    printf '  %s$ curl %s &%s\n' "$dim" "$2" "$plain"
    ip netns exec "$pod" curl -sS -g --noproxy '*' --max-time 60 -o "$dir/$1.body" \
        -w "%{url_effective}: HTTP %{http_code} after %{time_total} s" "$2" >"$dir/$1.out" 2>&1 </dev/null &
    pids[$1]=$!
}

finish_curl() {
    local status=0
    wait "${pids[$1]}" || status=$?
    unset "pids[$1]"
    ((status == 0)) || die "curl failed: $(cat "$dir/$1.out")"
    echo "$(cat "$dir/$1.out"): $(cat "$dir/$1.body")" | quote
}

# await CONDITION COMMAND… runs a command every 100 ms until it succeeds, for about 20 s.
await() {
    local condition=$1 n
    shift
    for ((n = 0; n < 200; n++)); do
        if "$@"; then return; fi
        sleep 0.1
    done
    die "timed out waiting until $condition"
}

step() {
    steps=$((steps + 1))
    printf '\n%s%d. %s%s\n' "$bold" "$steps" "$*" "$plain"
}
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
    for name in "${added[@]}"; do
        cni del "$name" >/dev/null 2>&1
    done
    for name in "${!pids[@]}"; do
        stop "$name" KILL
    done
    for name in "$pod" "$equipped" "$plain_pod" "$world" "$node"; do
        [[ -e /run/netns/$name ]] && ip netns del "$name"
    done
    [[ -n $cache ]] && rmdir "$cache/results" "$cache" 2>/dev/null
    rm -rf "$dir"
}

main
