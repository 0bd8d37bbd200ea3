"""sluice for mitmproxy: accepts the connections of captured pods in their own network namespaces.

    mitmdump -s sluice.py                              # a copy of this file
    mitmdump -s "$(python -m sluice_mitmproxy)"        # from the Python package sluice-mitmproxy

With `upstream.protocol: sockets`, sluiced hands over the sockets that listen in the netns of each captured pod.
This addon accepts connections on them. There is no relay between the pod and mitmproxy, and mitmproxy sees the
pod's own address. While mitmproxy does not run, connections wait in the kernel.

With `upstream.protocol: connect`, sluiced relays, and this addon reads the pod's name from the headers of sluiced's
CONNECT requests. It believes requests with the secret that sluiced keeps beside its socket.

The mode of mitmproxy's own server does not matter: it is for clients that use mitmproxy explicitly. Without such
clients, add `--set server=false`.

Flows name their pod in their comment (`~comment ^ci/`) and in their metadata (`~meta "^sluice.namespace: ci$"`):
sluice.pod, sluice.namespace, sluice.name, sluice.uid, sluice.node, sluice.direction, sluice.labels. Lines of
mitmdump and of the log show it behind the client's address: `10.0.0.5:40000 ci/runner-1`.

TLS of containers that are not known to trust mitmproxy's CA, of clients that refuse its certificates, and to names
for which the CA is not good, is passed through. It still is a flow, without contents: `~meta sluice.passed`.

mitmproxy loads its CA when it starts. This addon loads it again when the file changes.

mitmproxy loads this file again when it changes. Connections that are open go on, and connections that wait are
accepted by the new instance.

Needs mitmproxy 8.1.1 or later and no other package. docs/proxies.md in sluice's repository describes the protocol.
"""

from __future__ import annotations

import asyncio
import contextvars
import errno
import functools
import gc
import hmac
import ipaddress
import json
import logging
import os
import re
import resource
import socket
import struct
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from mitmproxy import certs, ctx, platform, tcp, version
from mitmproxy.connection import ConnectionState
from mitmproxy.net import tls as net_tls
from mitmproxy.proxy import layers
from mitmproxy.utils import human
from OpenSSL import SSL

PROTOCOL = 1
MAX_MESSAGE = 64 << 10
SECRET_FILE = "proxy.secret"  # in the folder of the socket
RECONNECT = 0.25  # seconds
SILENCE = 5  # seconds; sluiced sends a message every second
RESERVE = 16  # descriptors for everything that is not a connection
HEAD_BYTES = 256 << 10  # of a conversation over raw TCP or a WebSocket, if the flows in memory are bounded
HEAD_MESSAGES = 1024
REFUSALS = 2  # in a row; then the TLS of a pod to a name is passed through
REFUSAL_LASTS = 60 * 60  # seconds
REFUSAL_CLOSES = 10  # seconds after the handshake, at most
REFUSED_NAMES = 128  # of one pod
REFUSED_PODS = 256
LINES = 20  # of the log about one subject, in a second

Facts = dict[str, Any]  # the metadata of a pod's flows

# Addresses of cloud metadata services, which serve a node's credentials, beside the link-local addresses.
METADATA = {ipaddress.ip_address("fd00:ec2::254"), ipaddress.ip_address("fd20:ce::254")}

# Addresses of Azure's and Alibaba's services for their nodes, which trust the node that asks.
NODE_SERVICES = {ipaddress.ip_address("168.63.129.16"), ipaddress.ip_address("100.100.100.200")}


def log(level: int, text: str, *args: Any) -> None:
    """Logs a message in the way that this version of mitmproxy displays."""
    if version.VERSION.startswith("8."):
        ctx.log("sluice: " + text % args, logging.getLevelName(level).lower().replace("warning", "warn"))
    else:
        logging.log(level, "sluice: " + text, *args)


class Lines:
    """Lines of the log about connections of pods, LINES of them in a second. Further ones are counted by pod."""

    def __init__(self, level: int, subject: str):
        self.level = level
        self.subject = subject
        self.written = 0  # in this second
        self.more: Counter[str] = Counter()  # by pod

    def add(self, pod: str, text: str) -> None:
        if self.written == LINES:
            self.more[pod] += 1
            return
        if self.written == 0:
            asyncio.get_running_loop().call_later(1, self.end_second)
        self.written += 1
        log(self.level, "%s: %s %s", self.subject, pod, text)

    def end_second(self) -> None:
        if self.more:
            log(self.level, "%s: more connections in one second: %s", self.subject,
                ", ".join(f"{count} of {pod}" for pod, count in self.more.most_common()))
        self.written = 0
        self.more.clear()


def destination_of(client: Any, server: Any) -> str:
    """Names the server of a TLS connection, as its client does, and by its address."""
    return f"to {client.sni or 'no SNI'} ({human.format_address(server.address)})"


class Kept:
    """The connections that the addon serves. mitmproxy's master keeps it while the addon is loaded again."""

    def __init__(self) -> None:
        # asyncio keeps weak references only: the garbage collector could end a task.
        self.tasks: set[asyncio.Task[None]] = set()  # one for each connection
        # The connection of the current task, between accept() and mitmproxy's first hook.
        self.current: contextvars.ContextVar[tuple[Facts, Writer] | None]
        self.current = contextvars.ContextVar("sluice", default=None)
        self.refusals = Refusals()

    @classmethod
    def of(cls, master: Any) -> Kept:
        kept = cls()
        # An older version of this file may have kept less.
        vars(kept).update(vars(vars(master).get("sluice", kept)))
        vars(master)["sluice"] = kept
        return kept


class Listener:
    """One listening socket in the netns of a pod."""

    def __init__(self, sock: socket.socket, pod: dict[str, Any], direction: str):
        self.sock = sock
        self.pod = pod
        self.direction = direction

    def facts(self, node: str, peer: str) -> Facts:
        nested = self.direction != "inbound" and is_nested(peer, self.pod["ips"])
        containers = self.pod.get("containers")
        container = containers.get(peer, "unknown") if nested and containers is not None else ""
        return facts_of(self.pod, self.direction, node, nested, container)


def facts_of(pod: dict[str, Any], direction: str, node: str, nested: bool = False, container: str = "") -> Facts:
    """Returns the metadata of the flows of a pod.

    container is the state of trust of a nested container, if sluiced gives it the CA.
    """
    facts = {
        "sluice.pod": f"{pod['namespace']}/{pod['name']}",
        "sluice.namespace": pod["namespace"],
        "sluice.name": pod["name"],
        "sluice.uid": pod["uid"],
        "sluice.node": node,
        "sluice.direction": direction,
    }
    if pod.get("labels"):
        facts["sluice.labels"] = pod["labels"]
    if nested:
        facts["sluice.nested"] = True
    if pod.get("trust"):  # an older sluiced does not know it
        policy = pod.get("tls", "pass")
        facts["sluice.trust"] = pod["trust"]
        facts["sluice.tls"] = pod.get("nested", policy) if nested else policy
        if container:
            # As with the pod's own containers: inspected if it trusts the CA, until a client refuses a certificate.
            facts["sluice.container_trust"] = container
            facts["sluice.tls"] = "pass"
    return facts


def learns(facts: Facts) -> bool:
    """Reports whether TLS may be passed through because of the client's behaviour."""
    return "sluice.trust" in facts and facts["sluice.tls"] != "inspect"


def reason_to_pass(facts: Facts, in_zones: bool) -> str:
    """Returns the reason why TLS is passed through, whatever its client does. Empty: it is inspected.

    in_zones tells whether the CA can sign for the name that the client asks for.
    """
    if not learns(facts):
        return ""
    if facts["sluice.direction"] == "inbound":
        return "inbound"  # the client is not the pod, whose trust says nothing about it
    if "sluice.container_trust" in facts:
        container = facts["sluice.container_trust"]
        if container != "trusted":
            return f"nested, trust {container}"
    elif "sluice.nested" in facts:
        return "nested"
    elif facts["sluice.trust"] != "trusted":
        return f"trust {facts['sluice.trust']}"
    return "" if in_zones else "not in the zones of the CA"


def zones_of(certificate: x509.Certificate) -> list[str]:
    """Returns the DNS zones for which a CA is good, by its name constraints. Empty: all names."""
    try:
        constraints = certificate.extensions.get_extension_for_class(x509.NameConstraints).value
    except x509.ExtensionNotFound:
        return []
    return [s.value.lower() for s in constraints.permitted_subtrees or [] if isinstance(s, x509.DNSName)]


def is_in(name: str, zone: str) -> bool:
    """Reports whether a DNS name is in a zone. With a dot at its front, a zone has the names below it alone."""
    return zone in ("", name) or name.endswith("." + zone.lstrip("."))


class Listeners:
    """The listening sockets that sluiced has handed over, by attachment ID, and the accept loop on them."""

    def __init__(self, serve: Callable[[socket.socket, Listener], None]):
        self.serve = serve
        self.held: dict[str, list[Listener]] = {}
        self.paused = False

    def attach(self, id: str, listeners: list[Listener]) -> None:
        self.detach(id)
        self.held[id] = listeners
        for listener in listeners:
            listener.sock.setblocking(False)
            self._watch(listener)

    def detach(self, id: str) -> None:
        for listener in self.held.pop(id, []):
            asyncio.get_running_loop().remove_reader(listener.sock)
            listener.sock.close()

    def describe(self, id: str, pod: dict[str, Any]) -> None:
        """Replaces the description of a pod. New connections have it."""
        for listener in self.held.get(id, []):
            listener.pod = pod

    def forget_trust(self) -> None:
        """Makes the trust of all pods unknown, until sluiced describes them again.

        A container that starts without sluiced does not trust the CA, in a pod that did.
        """
        for listener in self._all():
            if listener.pod.get("trust"):  # an older sluiced does not know it
                listener.pod = {**listener.pod, "trust": "unknown"}
            if "containers" in listener.pod:
                listener.pod = {**listener.pod, "containers": {}}

    def close(self) -> None:
        for id in list(self.held):
            self.detach(id)

    def pause(self) -> None:
        """Stops accepting: new connections wait in the kernel."""
        self.paused = True
        for listener in self._all():
            asyncio.get_running_loop().remove_reader(listener.sock)

    def resume(self) -> None:
        self.paused = False
        for listener in self._all():
            self._watch(listener)

    def _all(self) -> list[Listener]:
        return [listener for listeners in self.held.values() for listener in listeners]

    def _watch(self, listener: Listener) -> None:
        if listener.sock.fileno() >= 0 and not self.paused:  # a closed socket has no descriptor
            asyncio.get_running_loop().add_reader(listener.sock, self._accept, listener)

    def _accept(self, listener: Listener) -> None:
        # Accept one connection per event: other proxies share the accept queue and can take the next one. asyncio's
        # servers call listen() again, which would shrink the queue for every process that shares it.
        loop = asyncio.get_running_loop()
        try:
            conn, _ = listener.sock.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as e:
            loop.remove_reader(listener.sock)
            if e.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                log(logging.WARNING, "accepting for %s: %s", listener.pod["name"], e)
                loop.call_later(1, self._watch, listener)
            return  # any other error: sluiced has shut the listener down, and the "detach" message follows
        conn.setblocking(False)
        self.serve(conn, listener)


async def _ready(sock: socket.socket, add: Callable[..., Any], remove: Callable[..., Any]) -> None:
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def ready() -> None:
        if not done.done():
            done.set_result(None)

    add(sock, ready)
    try:
        await done
    finally:
        remove(sock)


async def send(sock: socket.socket, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
    data = json.dumps(message).encode()
    loop = asyncio.get_running_loop()
    while True:
        try:
            if fds:
                socket.send_fds(sock, [data], list(fds))
            else:
                sock.send(data)
            return
        except BlockingIOError:
            await _ready(sock, loop.add_writer, loop.remove_writer)


async def receive(sock: socket.socket) -> tuple[dict[str, Any], list[socket.socket]]:
    """Receives a message and its sockets. Python closes the sockets if the caller has been cancelled meanwhile."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            data, fds, _, _ = socket.recv_fds(sock, MAX_MESSAGE, 16)
        except BlockingIOError:
            await _ready(sock, loop.add_reader, loop.remove_reader)
            continue
        sockets = [socket.socket(fileno=fd) for fd in fds]
        if not data:
            raise EOFError("sluiced has closed the connection")
        return json.loads(data), sockets


class Session:
    """The connection to sluiced. It reconnects without end, and keeps the listening sockets in between."""

    def __init__(self, path: str, labels: Sequence[str], listeners: Listeners, connections: Callable[[], int]):
        self.path = path
        self.labels = list(labels)
        self.listeners = listeners
        self.connections = connections
        self.node = ""
        self.silent = False  # no message has come for some seconds, so sluiced hangs

    def facts(self, listener: Listener, peer: str) -> Facts:
        """Returns the metadata of the flows of a new connection."""
        facts = listener.facts(self.node, peer)
        if self.silent and "sluice.trust" in facts:  # it may have changed meanwhile
            facts["sluice.trust"] = "unknown"
            if "sluice.container_trust" in facts:
                facts["sluice.container_trust"] = "unknown"
        return facts

    async def run(self) -> None:
        logged = ""
        while True:
            try:
                await self._talk()
            except Exception as e:  # a message of any kind must not end this task
                self.listeners.forget_trust()
                if logged != repr(e):
                    log(logging.WARNING, "%s: %s; connecting again", self.path, e)
                logged = repr(e)
            await asyncio.sleep(RECONNECT)

    async def _talk(self) -> None:
        loop = asyncio.get_running_loop()
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.setblocking(False)
            bound = self._socket_identity()
            await loop.sock_connect(sock, self.path)
            await self._unless_replaced(self._greet(sock), bound)
            while True:
                message, sockets = await self._unless_replaced(receive(sock), bound)
                try:
                    answer = self._obey(message, sockets)
                except Exception:
                    for s in sockets:
                        s.close()
                    raise
                if answer:
                    await send(sock, answer)

    def _socket_identity(self) -> tuple[int, int] | None:
        """Identifies the socket that is at the path now: another sluiced binds a new one."""
        try:
            at = os.stat(self.path)
        except OSError:
            return None
        return at.st_dev, at.st_ino

    async def _unless_replaced(self, call: Awaitable[Any], bound: tuple[int, int] | None) -> Any:
        """Waits for a call to sluiced, until another sluiced has taken the place of a hanging one."""
        task = asyncio.ensure_future(call)
        try:
            while not (await asyncio.wait([task], timeout=SILENCE))[0]:
                self.silent = True
                if self._socket_identity() not in (None, bound):
                    raise EOFError("sluiced hangs, and another sluiced has taken its place")
            self.silent = False
            return task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)  # the task ends before its socket is closed

    async def _greet(self, sock: socket.socket) -> None:
        held = list(self.listeners.held.items())
        # The netns descriptor lets sluiced recognise the proxy's own connections.
        with open("/proc/self/ns/net", "rb") as network:
            await send(sock, {
                "kind": "hello", "version": PROTOCOL, "name": f"mitmproxy {version.VERSION}, pid {os.getpid()}",
                "labels": self.labels, "held": len(held),
            }, [network.fileno()])
        for id, listeners in held:
            await send(sock, {"kind": "held", "id": id}, [listener.sock.fileno() for listener in listeners])

    def _obey(self, message: dict[str, Any], sockets: list[socket.socket]) -> dict[str, Any] | None:
        kind = message["kind"]
        if kind == "hello":
            self.node = message.get("node", "")
            log(logging.INFO, "connected to sluiced at %s", self.path)
        elif kind == "attach":
            if len(sockets) != len(message["listeners"]):
                raise ValueError(f"{len(sockets)} sockets for {len(message['listeners'])} listeners")
            self.listeners.attach(message["id"], [
                Listener(s, message["pod"], described["direction"])
                for s, described in zip(sockets, message["listeners"])  # noqa: B905 - strict= needs Python 3.10
            ])
        elif kind == "pod":
            self.listeners.describe(message["id"], message["pod"])
        elif kind == "detach":
            self.listeners.detach(message["id"])
            return {"kind": "detached", "id": message["id"]}
        elif kind == "ping":
            return {"kind": "state", "connections": self.connections()}
        elif kind == "error":
            raise ValueError(message.get("error", "sluiced refuses"))
        return None  # a later version may send other kinds of messages


class Port(int):
    """The port of a pod's client. Wherever mitmproxy displays the client's address, the pod's name follows."""

    pod: str

    def __new__(cls, port: int, pod: str) -> Port:
        self = super().__new__(cls, port)
        self.pod = pod
        return self

    # mitmproxy caches the text of an address. Ports of different pods, and the number alone, must not share it.
    def __eq__(self, other: object) -> bool:
        return int(self) == other and getattr(other, "pod", self.pod) == self.pod

    def __hash__(self) -> int:
        return hash((int(self), self.pod))

    def __format__(self, spec: str) -> str:
        # mitmproxy formats addresses as f"{host}:{port}". Files and JSON are made with str() and repr(), and
        # contain the number only.
        return super().__format__(spec) if spec else f"{super().__format__(spec)} {self.pod}"


class Writer(asyncio.StreamWriter):
    """The connection to an app. It ends with a reset if the connection to the server failed or was reset.

    mitmproxy itself would end it like one that the server has closed in good order.
    """

    peername: tuple[Any, ...]  # as mitmproxy is to see it
    server: Any = None  # mitmproxy's newest connection to a server for this app
    server_reader: asyncio.StreamReader | None = None
    answered = False  # mitmproxy has written to the app after the server failed: an error page

    @classmethod
    async def open(cls, conn: socket.socket, peername: tuple[Any, ...]) -> tuple[asyncio.StreamReader, Writer]:
        """Does what asyncio.open_connection() does, with a writer of this class."""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(loop=loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        transport, _ = await loop.create_connection(lambda: protocol, sock=conn)
        writer = cls(transport, protocol, reader, loop)
        writer.peername = peername
        return reader, writer

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self.peername if name == "peername" else super().get_extra_info(name, default)

    def connecting(self, server: Any) -> None:
        """Notes that mitmproxy connects to a server."""
        self.server, self.server_reader, self.answered = server, None, False

    def server_failed(self) -> bool:
        if self.server_reader:
            return isinstance(self.server_reader.exception(), OSError)
        return self.server is not None and bool(self.server.error) and not self.server.timestamp_tcp_setup

    def write(self, data: Any) -> None:
        self.answered = self.answered or self.server_failed()
        super().write(data)

    def write_eof(self) -> None:
        # mitmproxy half-closes raw TCP only, to which it adds nothing of its own.
        if self.server_failed():
            self._reset()
        else:
            super().write_eof()

    def close(self) -> None:
        if self.server_failed() and not self.answered:
            self._reset()
        else:
            super().close()

    def _reset(self) -> None:
        if not self.transport.is_closing():
            reset_at_close(self.get_extra_info("socket"))
        super().close()


def reset_at_close(sock: socket.socket) -> None:
    """Makes close() send a reset."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def pod_address(host: str, ips: Sequence[str]) -> str:
    """Replaces the address of a container nested in the pod, which is not unique, by the pod's own address."""
    if host in ips:
        return host
    return next((ip for ip in ips if (":" in ip) == (":" in host)), host)


def is_nested(host: str, ips: Sequence[str]) -> bool:
    """Reports whether a connection out of a pod comes from a container nested in it."""
    return host not in ips and not ipaddress.ip_address(host).is_loopback


def forbidden(destination: tuple[Any, ...], local: tuple[Any, ...]) -> str:
    """Returns the reason why the proxy must not connect to a destination for a pod, or an empty string.

    From the proxy's netns and under the node's identity, such an address means something else than in the pod.
    """
    ip = ipaddress.ip_address(destination[0])
    ip = getattr(ip, "ipv4_mapped", None) or ip
    if destination[:2] == local[:2]:
        return "the connection was not redirected"
    if ip.is_loopback or ip.is_unspecified:
        return "the destination is a loopback address, which would be the proxy's own"
    if ip.is_link_local or ip in METADATA:
        return "the destination is link-local or a metadata service, which would see the node's identity"
    if ip.is_multicast or ip == ipaddress.ip_address("255.255.255.255"):
        return "the destination is not a unicast address"
    return ""


def gone(conn: socket.socket) -> bool:
    """Reports whether the client has closed the connection, or has reset it."""
    ESTABLISHED = 1  # TCP_ESTABLISHED in include/net/tcp_states.h; the first byte of struct tcp_info is the state
    state: int = conn.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
    return state != ESTABLISHED


def means_node(destination: tuple[Any, ...]) -> str:
    """Returns the reason why a destination means the node or the proxy itself, or an empty string."""
    ip = ipaddress.ip_address(destination[0])
    ip = getattr(ip, "ipv4_mapped", None) or ip
    if ip in NODE_SERVICES:
        return "the destination is a cloud's service for nodes, which would see the node's identity"
    try:
        socket.if_nametoindex("kube-ipvs0")
    except OSError:
        if source_to(str(ip)) == str(ip):
            return "the destination is the node's or the proxy's own, which it would reach through its loopback"
    # With IPVS the addresses of all services are the node's own.
    return ""


def source_to(host: str) -> str:
    """Returns the address from which this process connects to a host; empty if no route leads there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as s:
        try:
            s.connect((host, 9))  # on UDP this only looks up the route, and sends no packet
        except OSError:
            return ""
        return str(s.getsockname()[0])


def own(peername: tuple[Any, ...], pod: tuple[Any, ...]) -> bool:
    """Reports whether the proxy itself opened a connection to a pod. Forwarded, it would come back without end."""
    return bool(source_to(pod[0]) == peername[0])


class Front:
    """Serves accepted connections as mitmproxy's transparent mode does, in any mode of mitmproxy's own server."""

    serve: Callable[[asyncio.StreamReader, Any], Awaitable[None]]

    def __init__(self, master: Any):
        self.master = master
        self.server = master.addons.get("proxyserver")
        if hasattr(self.server, "handle_tcp_connection"):
            self.serve = self._serve_8
            return
        # From 9 on a server instance has a mode and serves one stream. This one is never started, so it does not
        # listen. Its flows are those of the mode `transparent`, and every mitmproxy can open files with them.
        from mitmproxy.proxy import mode_servers

        instance: Any = mode_servers.ServerInstance.make("transparent", self.server)
        # The method had another name before 10.1.
        self.serve = getattr(instance, "handle_stream", None) or instance.handle_tcp_connection

    async def _serve_8(self, reader: asyncio.StreamReader, writer: Any) -> None:
        from mitmproxy.addons import proxyserver

        module: Any = proxyserver  # later versions have other names in it
        # The same steps as the server's own handle_tcp_connection, which would take the top layer from the option
        # `mode`.
        id = ("tcp", writer.get_extra_info("peername"), writer.get_extra_info("sockname"))
        handler = module.ProxyConnectionHandler(self.master, reader, writer, ctx.options)
        handler.layer = layers.modes.TransparentProxy(handler.layer.context)
        self.server._connections[id] = handler
        await self.server.handle_connection(id)


def transport_of(client: Any, connection: Any) -> Any:
    """Returns the reader and the writer of a connection that belongs to a client, or None if it has none."""
    server: Any = ctx.master.addons.get("proxyserver")
    connections = getattr(server, "connections", None) or getattr(server, "_connections", {})
    handler = connections.get(client.id)
    if not handler:  # an older version, such as 8 and 9; http_connect() may have changed the port since
        host, port, *scope = client.peername
        for peername in (client.peername, (host, int(port), *scope)):
            handler = handler or connections.get(("tcp", peername, client.sockname))
    transport = handler.transports.get(connection) if handler else None
    return transport if transport and transport.writer else None


class Refusals:
    """The names for which clients refuse mitmproxy's certificates, by pod. Their number is bounded.

    One refusal is not enough, and no refusal counts from before a client that has accepted a certificate: so one
    program that trusts nothing does not hide the TLS of others that name the same server.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic):
        self.now = now
        # Number of refusals in a row and time of the last one, by pod and name; the oldest first.
        self.pods: OrderedDict[str, OrderedDict[str, tuple[int, float]]] = OrderedDict()

    def passes(self, pod: str, name: str) -> bool:
        """Reports whether TLS from a pod to a name is to be passed through."""
        count, last = self._get(pod, name)
        return count >= REFUSALS and self.now() - last < REFUSAL_LASTS

    def refused(self, pod: str, name: str) -> bool:
        """Counts a refusal. Reports whether it is the one after which TLS is passed through."""
        count, last = self._get(pod, name)
        count = count + 1 if self.now() - last < REFUSAL_LASTS else 1
        names = self.pods.setdefault(pod, OrderedDict())
        names[name] = (count, self.now())
        names.move_to_end(name)
        self.pods.move_to_end(pod)
        if len(names) > REFUSED_NAMES:
            names.popitem(last=False)
        if len(self.pods) > REFUSED_PODS:
            self.pods.popitem(last=False)
        return count == REFUSALS

    def accepted(self, pod: str, name: str) -> None:
        """Forgets the refusals of a name."""
        if pod in self.pods:
            self.pods[pod].pop(name, None)

    def _get(self, pod: str, name: str) -> tuple[int, float]:
        return self.pods[pod].get(name, (0, 0.0)) if pod in self.pods else (0, 0.0)


class Inspected:
    """A TLS connection that mitmproxy answers, until it is known whether the client accepts the certificate."""

    METHODS = ("feed_data", "feed_eof", "set_exception")  # of asyncio's streams
    # Alerts of a client that does not accept a certificate, as OpenSSL names them.
    ALERT = re.compile(
        r"alert (unknown ca|(bad|unsupported) certificate|certificate (revoked|expired|unknown))\b",
    )

    def __init__(self, pod: str, name: str, transport: Any, server: Any):
        self.pod = pod  # its uid or its address
        self.name = name
        self.reader, self.writer = transport.reader, transport.writer
        self.server = server
        self.tls: Any = None  # when it is established
        self.established = 0.0
        self.ended_by_client = False
        self.server_open = True  # when the client was heard last
        # mitmproxy's hooks do not tell which side has ended first, so watch the stream of the client.
        for method in self.METHODS:
            setattr(self.reader, method, functools.partial(self._hear, method, getattr(self.reader, method)))

    @classmethod
    def take(cls, client: Any) -> Inspected | None:
        """Takes the one of a client, if there is one, and leaves the stream to mitmproxy."""
        inspected: Inspected | None = vars(client).pop("sluice_inspected", None)
        if inspected:
            for method in cls.METHODS:
                vars(inspected.reader).pop(method, None)
        return inspected

    def _hear(self, method: str, call: Callable[..., None], *args: Any) -> None:
        by_proxy = method == "feed_eof" and self.writer.is_closing()
        if not by_proxy:
            self.ended_by_client |= method != "feed_data"
            self.server_open = not self.server.timestamp_start or bool(self.server.state & ConnectionState.CAN_READ)
        call(*args)

    def failed(self, error: str) -> str:
        """Returns how the client refuses the certificate, by the error of the handshake. Empty: it does not."""
        alert = self.ALERT.search(error)
        if alert:
            return alert.group()
        silent = "disconnected during the handshake" in error
        return "end during the handshake" if silent and self.ended_by_client else ""

    def closed(self) -> str:
        """Returns how the client refuses the certificate by the end of a connection on which it has said nothing.

        Some clients look at the certificate after the handshake: GnuTLS in wget, git and curl, Node.js, and those
        that compare the certificate with a pinned one. Empty: the end is no refusal.
        """
        if not self.tls or time.monotonic() - self.established > REFUSAL_CLOSES:
            return ""
        notified = self.tls.get_shutdown() & SSL.RECEIVED_SHUTDOWN  # mitmproxy ends the connection then
        refused = (notified or self.ended_by_client) and self.server_open
        return "end after the handshake" if refused else ""


class Passed:
    """A TLS connection that is passed through. mitmproxy makes no flow of it, so this does."""

    def __init__(self, context: Any, pod: str, reason: str):
        self.pod = pod
        self.reason = reason
        self.up = self.down = 0
        # A flow that counts as live could be killed in the list, which would not end the connection.
        self.flow = tcp.TCPFlow(context.client, context.server, live=False)

    def count(self, client: Any, connection: Any) -> None:
        """Counts the bytes that mitmproxy writes to one of the two connections."""
        transport = transport_of(client, connection)
        if not transport:
            return
        write = transport.writer.write

        def counted(data: bytes) -> None:
            if connection is client:
                self.down += len(data)
            else:
                self.up += len(data)
            write(data)

        transport.writer.write = counted

    def __str__(self) -> str:
        client, server = self.flow.client_conn, self.flow.server_conn
        seconds = time.time() - client.timestamp_start
        return (f"{destination_of(client, server)}, {self.reason}, {self.up} bytes up, {self.down} down, "
                f"{seconds:.1f} s")


class Authority:
    """mitmproxy's CA, which mitmproxy itself loads once. This loads it again when its file has changed."""

    def __init__(self) -> None:
        self.store: Any = None  # that of mitmproxy when the file was read
        self.file: tuple[int, ...] = ()  # as it was read

    def refresh(self) -> None:
        config: Any = ctx.master.addons.get("tlsconfig")
        folder = Path(ctx.options.confdir).expanduser()
        try:
            at = (folder / "mitmproxy-ca.pem").stat()
        except OSError:
            return  # it may be on its way
        file = at.st_dev, at.st_ino, at.st_size, at.st_mtime_ns
        if config.certstore is self.store and file == self.file:
            return
        loaded_before = bool(self.file)
        self.file = file
        try:
            config.certstore = self._load(folder, config.certstore)
        except Exception as e:  # each version of mitmproxy and of OpenSSL has other ones
            log(logging.WARNING, "%s/mitmproxy-ca.pem cannot be used, the CA stays: %.200r", folder, e)
        else:
            # From 9 on it caches contexts by the path of the chain, and the descriptor's number may come again.
            context: Any = net_tls.create_client_proxy_context
            context.cache_clear()
            if loaded_before:
                log(logging.INFO, "the CA was loaded again: %s", config.certstore.default_ca.cn)
        self.store = config.certstore

    @staticmethod
    def permits(name: str | None) -> bool:
        """Reports whether each certificate of the chain permits a name. None: a connection without SNI."""
        config: Any = ctx.master.addons.get("tlsconfig")
        constraints = getattr(config.certstore, "sluice_zones", [])  # mitmproxy's own store has none
        name = (name or "").lower().rstrip(".")
        return all(name and any(is_in(name, zone) for zone in zones) for zones in constraints)

    @staticmethod
    def _load(folder: Path, old: Any) -> Any:
        """Returns a store without leaves. It sends the chain as it is in the file now.

        OpenSSL reads the chain later, from the file. So the store gets a copy, which no process changes.
        """
        copy = os.fdopen(os.memfd_create("mitmproxy-ca"), "wb")
        copy.write((folder / "mitmproxy-ca.pem").read_bytes())
        copy.flush()
        path = Path(f"/proc/self/fd/{copy.fileno()}")
        passphrase = ctx.options.cert_passphrase
        store: Any = certs.CertStore.from_files(
            path, folder / "mitmproxy-dhparam.pem", passphrase.encode() if passphrase else None,
        )
        store.sluice_copy = copy  # closed with the store
        chain = [part for part in re.split(b"(?=-----BEGIN )", path.read_bytes()) if b"CERTIFICATE-----" in part]
        certificates = [x509.load_pem_x509_certificate(part) for part in chain]
        keys = [certificate.public_key() for certificate in certificates]  # all of them can be read
        if public(keys[0]) != public(store.default_privatekey.public_key()):
            raise ValueError("the key is not that of the first certificate")
        store.sluice_zones = [zones for zones in map(zones_of, certificates) if zones]
        # Certificates of the option `certs` have a name as their key.
        store.certs.update({name: entry for name, entry in old.certs.items() if isinstance(name, str)})
        return store


def public(key: Any) -> bytes:
    encoded: bytes = key.public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo,
    )
    return encoded


def leaves_name_their_issuer() -> None:
    """Makes mitmproxy's leaves name the key of their issuer as the issuer itself does.

    Up to 10.0 they have no Authority Key Identifier, and Python 3.13 refuses them. Up to 12.1 it is the SHA-1 of
    the issuer's key, whatever the issuer has, and OpenSSL builds no chain in which both differ.
    """
    module: Any = certs
    make = getattr(module.dummy_cert, "sluice_replaces", module.dummy_cert)  # this file may be loaded again

    def dummy_cert(key: Any, issuer: x509.Certificate, *args: Any, **kwargs: Any) -> Any:
        made = make(key, issuer, *args, **kwargs)
        leaf: x509.Certificate = made._cert
        others = [e for e in leaf.extensions if not isinstance(e.value, x509.AuthorityKeyIdentifier)]
        identifier: x509.AuthorityKeyIdentifier
        try:
            of_issuer = issuer.extensions.get_extension_for_class(x509.SubjectKeyIdentifier)
            identifier = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(of_issuer.value)
        except x509.ExtensionNotFound:
            issuer_key: Any = issuer.public_key()
            identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key)
        if any(e.value == identifier for e in leaf.extensions):
            return made
        # Older versions of cryptography have these times without a zone, and newer ones warn of them.
        times: Any = leaf if hasattr(leaf, "not_valid_before_utc") else None
        builder = x509.CertificateBuilder(
            leaf.issuer, leaf.subject, leaf.public_key(), leaf.serial_number,
            times.not_valid_before_utc if times else leaf.not_valid_before,
            times.not_valid_after_utc if times else leaf.not_valid_after,
        )
        for extension in others:
            builder = builder.add_extension(extension.value, extension.critical)
        return certs.Cert(builder.add_extension(identifier, critical=False).sign(key, hashes.SHA256()))

    replacement: Any = dummy_cert
    replacement.sluice_replaces = make
    module.dummy_cert = replacement


class Sluice:
    """The addon. A connection's facts are an attribute of mitmproxy's client object, where its next instance finds
    them.
    """

    def __init__(self) -> None:
        self.listeners = Listeners(self.serve)
        self.session: Session | None = None
        self.talking: asyncio.Task[None] | None = None
        self.front: Front | None = None
        self.kept = Kept()
        self.authority = Authority()
        self.passed_lines = Lines(logging.INFO, "TLS passed through")
        self.refused_lines = Lines(logging.WARNING, "certificate refused")
        self.room = 0  # number of further connections for which there are descriptors: a lower bound
        self.flows = 0  # number of flows since they were last counted

    def load(self, loader: Any) -> None:
        leaves_name_their_issuer()
        before = {name: value for name, value in ctx.options.items() if name.startswith("sluice_")}
        loader.add_option(
            "sluice_socket", str, "/run/sluice/proxy.sock",
            "Unix socket of sluiced, which hands over the listening sockets of pods. Empty: do not connect to it.",
        )
        loader.add_option("sluice_labels", Sequence[str], [], "Pod labels to add to the metadata of flows.")
        loader.add_option(
            "sluice_flows", int, 0,
            "Number of flows to keep in the list of mitmproxy and mitmweb: the oldest finished flows without a "
            "mark are removed. Also bounds the messages of each raw TCP connection and WebSocket: of a long one, "
            "only the first messages and the newest one stay. 0: keep everything.",
        )
        loader.add_option(
            "sluice_node_addresses", bool, False,
            "Also connect to the addresses of the proxy's own network, which are the node's if the proxy is on its "
            "network, and to the services of Azure and Alibaba for their nodes (168.63.129.16, 100.100.100.200).",
        )
        # mitmproxy sets an option back to its default if its help or its default has changed with a new sluice.py.
        ctx.options.update(**{name: option.current() for name, option in before.items() if name in ctx.options})

    def running(self) -> None:
        self.kept = Kept.of(ctx.master)
        if not ctx.options.sluice_socket or self.session:
            return
        self.front = Front(ctx.master)
        self.warn()
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        self.session = Session(
            ctx.options.sluice_socket, ctx.options.sluice_labels, self.listeners, lambda: len(self.kept.tasks),
        )
        self.talking = asyncio.get_running_loop().create_task(self.session.run())

    def warn(self) -> None:
        """Warns of options that do not have the effect on pods that their name suggests."""
        mode = ctx.options.mode  # a list from 9 on
        if any(m.startswith("upstream:") for m in ([mode] if isinstance(mode, str) else mode)):
            log(logging.WARNING, "connections of pods do not go through the proxy of --mode upstream, but directly "
                "to their destinations")
        if ctx.options.proxyauth and self.authenticated() is None:
            log(logging.WARNING, "pods are asked for the credentials of the option proxyauth, and get status 401")

    def done(self) -> None:
        if self.talking:
            self.talking.cancel()  # established connections continue
        self.listeners.close()

    # From a listening socket to mitmproxy.

    def serve(self, conn: socket.socket, listener: Listener) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(conn, listener))
        self.kept.tasks.add(task)
        task.add_done_callback(self.kept.tasks.discard)
        self.room -= 1
        if not self.has_room():
            self.listeners.pause()
            self.wait_for_room()

    def has_room(self) -> bool:
        """Reports whether there are descriptors for one more connection.

        Without a descriptor for the connection to the server, mitmproxy would end the client's connection.
        """
        if self.room <= 0:
            self.count_room()
        if self.room <= 0:
            gc.collect()  # mitmproxy leaves it to the garbage collector to close connections to servers
            self.count_room()
        return self.room > 0

    def count_room(self) -> None:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        # A connection that is served needs one more descriptor as long as it has no server.
        free = limit - len(os.listdir("/proc/self/fd")) - len(self.kept.tasks) - RESERVE
        self.room = free // 3  # counted again after so many connections

    def wait_for_room(self) -> None:
        if self.has_room():
            self.listeners.resume()
        else:
            asyncio.get_running_loop().call_later(0.1, self.wait_for_room)

    async def _serve(self, conn: socket.socket, listener: Listener) -> None:
        assert self.session and self.front
        writer: Writer | None = None
        try:
            if self._refuse(conn, listener):
                return
            conn.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            host, port, *scope = conn.getpeername()
            facts = self.session.facts(listener, host)
            if listener.direction != "inbound":
                host = pod_address(host, listener.pod["ips"])
            reader, writer = await Writer.open(conn, (host, Port(port, facts["sluice.pod"]), *scope))
            self.kept.current.set((facts, writer))
            await self.front.serve(reader, writer)
        except Exception as e:
            log(logging.ERROR, "%s: connection ended: %r", listener.pod["name"], e)
        finally:
            (writer or conn).close()  # mitmproxy leaves it to the garbage collector if the client ends first

    def _refuse(self, conn: socket.socket, listener: Listener) -> bool:
        """Reports whether conn must not be served. If so, the caller closes it, and it ends in the right way."""
        mine = False
        try:
            peer = conn.getpeername()
            destination = platform.original_addr(conn)  # type: ignore[misc]
            mine = listener.direction == "inbound" and own(peer, destination)
            reason = "the proxy itself opened it" if mine else forbidden(destination, conn.getsockname())
            if not reason and listener.direction != "inbound" and not ctx.options.sluice_node_addresses:
                reason = means_node(destination)
        except OSError as e:
            if gone(conn):
                log(logging.DEBUG, "%s: the client has gone before it was served", listener.pod["name"])
                return True
            reason = str(e)
        if not reason:
            return False
        log(logging.WARNING, "%s: connection refused: %s", listener.pod["name"], reason)
        # The proxy's own connection ends without a reset: mitmproxy 8 loops without end if a connection that it has
        # opened is reset before it has asked for the peer's address.
        if not mine:
            reset_at_close(conn)
        return True

    # Hooks of connections.

    def client_connected(self, client: Any) -> None:
        accepted = self.kept.current.get()
        if not accepted:
            return
        client.sluice_facts, client.sluice_writer = accepted
        authenticated = self.authenticated()
        if ctx.options.proxyauth and authenticated is not None:
            # An app does not know that there is a proxy, and could not answer.
            authenticated[client] = (client.sluice_facts["sluice.pod"], "")

    async def client_disconnected(self, client: Any) -> None:
        # Flows keep the client, for as long as they are listed.
        vars(client).pop("sluice_writer", None)
        inspected = Inspected.take(client)
        if inspected:
            self.refused(client, inspected, inspected.closed())
        passed: Passed | None = vars(client).pop("sluice_passed", None)
        if passed:
            await self.end_passed(passed)

    def authenticated(self) -> Any:
        """Returns the clients that mitmproxy does not ask for credentials any more."""
        return getattr(ctx.master.addons.get("proxyauth"), "authenticated", None)

    def server_connect(self, data: Any) -> None:
        writer = getattr(data.client, "sluice_writer", None)
        if writer:
            writer.connecting(data.server)

    def server_connected(self, data: Any) -> None:
        writer = getattr(data.client, "sluice_writer", None)
        if writer:
            transport = transport_of(data.client, data.server)
            writer.server_reader = transport.reader if transport else None
        passed: Passed | None = getattr(data.client, "sluice_passed", None)
        if passed:
            passed.count(data.client, data.server)

    # TLS: inspected, or passed through.

    async def tls_clienthello(self, data: Any) -> None:
        self.authority.refresh()
        client, server = data.context.client, data.context.server
        facts = getattr(client, "sluice_facts", None)
        if not facts:
            return
        # A pod that the runtime did not name has no uid.
        pod, name = facts["sluice.uid"] or client.peername[0], data.client_hello.sni or server.address[0]
        reason = reason_to_pass(facts, self.authority.permits(data.client_hello.sni))
        if not reason and learns(facts) and self.kept.refusals.passes(pod, name):
            reason = "the client refused the certificate"
        if reason:
            data.ignore_connection = True
            client.sluice_passed = passed = Passed(data.context, facts["sluice.pod"], reason)
            passed.count(client, client)
            passed.count(client, server)  # server_connected() does it if there is none yet
            await ctx.master.addons.handle_lifecycle(layers.tcp.TcpStartHook(passed.flow))
        elif "sluice.trust" in facts:
            transport = transport_of(client, client)
            if transport:
                client.sluice_inspected = Inspected(pod, name, transport, server)

    def tls_start_client(self, data: Any) -> None:
        inspected: Inspected | None = getattr(data.context.client, "sluice_inspected", None)
        if inspected and inspected.ended_by_client:
            Inspected.take(data.context.client)  # it has seen no certificate

    def tls_failed_client(self, data: Any) -> None:
        client = data.context.client
        inspected = Inspected.take(client)
        if inspected:
            self.refused(client, inspected, inspected.failed(client.error or ""))

    def tls_established_client(self, data: Any) -> None:
        inspected: Inspected | None = getattr(data.context.client, "sluice_inspected", None)
        if inspected:
            inspected.tls, inspected.established = data.ssl_conn, time.monotonic()

    def accepted(self, client: Any) -> None:
        """Notes that a client has said something after the handshake, so it accepts the certificate."""
        inspected = Inspected.take(client)
        if inspected and learns(client.sluice_facts):
            self.kept.refusals.accepted(inspected.pod, inspected.name)

    def refused(self, client: Any, inspected: Inspected, how: str) -> None:
        """Logs a refusal, and counts it if the policy is to pass TLS through. With an empty how, it is none."""
        if not how:
            return
        facts, text = client.sluice_facts, f"{destination_of(client, inspected.server)}, {how}"
        if "sluice.nested" in facts:
            text += ", nested"
        if facts["sluice.direction"] == "inbound":
            text += ", inbound"
        self.refused_lines.add(facts["sluice.pod"], text)
        if learns(facts) and self.kept.refusals.refused(inspected.pod, inspected.name):
            log(logging.INFO, "%s: clients refuse the certificate for %s, and their TLS is passed through for %d "
                "minutes", facts["sluice.pod"], inspected.name, REFUSAL_LASTS // 60)

    async def end_passed(self, passed: Passed) -> None:
        flow = passed.flow
        flow.comment += f", {passed.up} bytes up, {passed.down} down"
        flow.metadata.update({"sluice.up": passed.up, "sluice.down": passed.down})
        await ctx.master.addons.handle_lifecycle(layers.tcp.TcpEndHook(flow))
        self.passed_lines.add(passed.pod, str(passed))

    # From a connection to its flows.

    def mark(self, flow: Any) -> None:
        facts = getattr(flow.client_conn, "sluice_facts", None)
        if facts:
            flow.metadata.update(facts)
            flow.comment = facts["sluice.pod"] + (f" on {facts['sluice.node']}" if facts["sluice.node"] else "")
            if facts["sluice.direction"] == "inbound":
                flow.comment += ", inbound"
        passed: Passed | None = getattr(flow.client_conn, "sluice_passed", None)
        if passed:
            flow.metadata["sluice.passed"] = passed.reason
            flow.comment += f", TLS passed through: {passed.reason}"

    def started(self, flow: Any) -> None:
        self.mark(flow)
        self.flows += 1
        if 0 < ctx.options.sluice_flows <= self.flows * 10:
            self.flows = 0
            self.forget_flows(ctx.options.sluice_flows)

    def forget_flows(self, keep: int) -> None:
        """Removes the oldest finished flows from the list of mitmproxy and mitmweb. mitmdump has none."""
        view: Any = ctx.master.addons.get("view")
        excess = view.store_count() - keep if view else 0
        if excess <= 0:
            return
        for flow in view.resolve("@all"):
            if not (flow.live or flow.marked):
                view.remove([flow])  # one by one: it reports each removal of several flows in the log
                excess -= 1
                if excess == 0:
                    return

    def forget_messages(self, flow: Any, messages: list[Any]) -> None:
        """Keeps the head of a conversation and its newest message, which has not been passed on yet."""
        if not ctx.options.sluice_flows:
            return
        dropped = flow.metadata.get("sluice.dropped", 0)
        full = dropped or len(messages) % 16 == 0 and (
            len(messages) > HEAD_MESSAGES or sum(len(m.content) for m in messages) > HEAD_BYTES
        )
        if full:
            flow.metadata["sluice.dropped"] = dropped + len(messages[-2].content)
            del messages[-2]

    def requestheaders(self, flow: Any) -> None:
        self.accepted(flow.client_conn)
        self.started(flow)

    def tcp_start(self, flow: Any) -> None:
        self.started(flow)

    def dns_request(self, flow: Any) -> None:
        self.accepted(flow.client_conn)
        self.started(flow)

    def tcp_message(self, flow: Any) -> None:
        if flow.messages[-1].from_client:
            self.accepted(flow.client_conn)
        self.forget_messages(flow, flow.messages)

    def websocket_message(self, flow: Any) -> None:
        self.forget_messages(flow, flow.websocket.messages)

    def http_connect(self, flow: Any) -> None:
        """Reads the pod's name from the headers of a CONNECT request of a sluiced that relays, and removes them."""
        names = (
            "Secret", "Pod-Namespace", "Pod-Name", "Pod-UID", "Source", "Direction", "Trust", "TLS", "Nested",
            "Container-Trust",
        )
        headers = {name: flow.request.headers.pop(f"Sluice-{name}", "") for name in names}
        client = flow.client_conn
        if headers["Pod-Name"] and self.knows(headers["Secret"]):
            pod = {"namespace": headers["Pod-Namespace"], "name": headers["Pod-Name"], "uid": headers["Pod-UID"]}
            if headers["Trust"]:
                policy = headers["TLS"] or "pass"  # that of nested containers, if it is one
                pod.update({"trust": headers["Trust"], "tls": policy, "nested": policy})
            nested = headers["Nested"] == "true"
            facts = facts_of(pod, headers["Direction"] or "outbound", "", nested, headers["Container-Trust"])
            if headers["Source"]:
                facts["sluice.source"] = headers["Source"]
            client.sluice_facts = facts
            host, port, *scope = client.peername
            client.peername = (host, Port(port, facts["sluice.pod"]), *scope)
        self.mark(flow)

    @staticmethod
    def knows(secret: str) -> bool:
        """Reports whether a client has the secret of sluiced. Pods that reach mitmproxy do not have it."""
        path = ctx.options.sluice_socket
        try:
            known = (Path(path).parent / SECRET_FILE).read_bytes().strip() if path else b""
        except OSError:
            return False
        return bool(known) and hmac.compare_digest(known, secret.encode(errors="surrogateescape"))


addons = [Sluice()]

if __name__ == "__main__":
    print(__file__)  # for mitmdump -s "$(python -m sluice_mitmproxy)"
