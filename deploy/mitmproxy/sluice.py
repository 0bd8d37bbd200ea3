"""sluice for mitmproxy: accepts the connections of captured pods in their own network namespaces.

    mitmdump -s sluice.py

With `upstream.protocol: sockets`, sluiced hands over the sockets that listen in the netns of each captured pod.
This addon accepts connections on them. There is no relay between the pod and mitmproxy, and mitmproxy sees the
pod's own address. While mitmproxy does not run, connections wait in the kernel.

With `upstream.protocol: connect`, sluiced relays, and this addon reads the pod's name from the headers of sluiced's
CONNECT requests.

The mode of mitmproxy's own server does not matter: it is for clients that use mitmproxy explicitly. Without such
clients, add `--set server=false`.

Flows name their pod in their comment (`~comment ci/`) and in their metadata (`~meta ci/`): sluice.pod,
sluice.namespace, sluice.name, sluice.uid, sluice.node, sluice.direction, sluice.labels.

Needs mitmproxy 8.1 or later and no other package. docs/proxies.md in sluice's repository describes the protocol.
"""
import asyncio
import contextvars
import errno
import gc
import ipaddress
import json
import logging
import os
import resource
import socket
import struct
from typing import Any, Awaitable, Callable, Optional, Sequence

from mitmproxy import ctx, platform, version

PROTOCOL = 1
MAX_MESSAGE = 64 << 10
RECONNECT = 0.25  # seconds
SILENCE = 5  # seconds; sluiced sends a message every second
RESERVE = 16  # descriptors for everything that is not a connection

# Addresses of cloud metadata services, which serve a node's credentials, beside the link-local addresses.
METADATA = {ipaddress.ip_address("fd00:ec2::254"), ipaddress.ip_address("fd20:ce::254")}


def log(level: int, text: str, *args: Any) -> None:
    """Logs a message in the way that this version of mitmproxy displays."""
    if version.VERSION.startswith("8."):
        ctx.log("sluice: " + text % args, logging.getLevelName(level).lower().replace("warning", "warn"))
    else:
        logging.log(level, "sluice: " + text, *args)


# The facts of the pod that the current task serves.
current: contextvars.ContextVar[Optional[dict]] = contextvars.ContextVar("sluice", default=None)


class Listener:
    """One listening socket in the netns of a pod."""

    def __init__(self, sock: socket.socket, pod: dict, direction: str):
        self.sock = sock
        self.pod = pod
        self.direction = direction

    def facts(self, node: str) -> dict:
        facts = {
            "sluice.pod": f"{self.pod['namespace']}/{self.pod['name']}",
            "sluice.namespace": self.pod["namespace"],
            "sluice.name": self.pod["name"],
            "sluice.uid": self.pod["uid"],
            "sluice.node": node,
            "sluice.direction": self.direction,
        }
        if self.pod.get("labels"):
            facts["sluice.labels"] = self.pod["labels"]
        return facts


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


async def _ready(sock: socket.socket, add: Callable, remove: Callable) -> None:
    done = asyncio.get_running_loop().create_future()
    add(sock, lambda: done.done() or done.set_result(None))
    try:
        await done
    finally:
        remove(sock)


async def send(sock: socket.socket, message: dict, fds: Sequence[int] = ()) -> None:
    data = json.dumps(message).encode()
    loop = asyncio.get_running_loop()
    while True:
        try:
            if fds:
                socket.send_fds(sock, [data], fds)
            else:
                sock.send(data)
            return
        except BlockingIOError:
            await _ready(sock, loop.add_writer, loop.remove_writer)


async def receive(sock: socket.socket) -> tuple[dict, list[int]]:
    loop = asyncio.get_running_loop()
    while True:
        try:
            data, fds, _, _ = socket.recv_fds(sock, MAX_MESSAGE, 16)
        except BlockingIOError:
            await _ready(sock, loop.add_reader, loop.remove_reader)
            continue
        if not data:
            raise EOFError("sluiced has closed the connection")
        return json.loads(data), fds


class Session:
    """The connection to sluiced. It reconnects without end, and keeps the listening sockets in between."""

    def __init__(self, path: str, labels: Sequence[str], listeners: Listeners, connections: Callable[[], int]):
        self.path = path
        self.labels = list(labels)
        self.listeners = listeners
        self.connections = connections
        self.node = ""

    async def run(self) -> None:
        logged = ""
        while True:
            try:
                await self._talk()
            except (OSError, EOFError, ValueError, KeyError) as e:
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
                message, fds = await self._unless_replaced(receive(sock), bound)
                sockets = [socket.socket(fileno=fd) for fd in fds]
                try:
                    answer = self._obey(message, sockets)
                except Exception:
                    for s in sockets:
                        s.close()
                    raise
                if answer:
                    await send(sock, answer)

    def _socket_identity(self) -> Optional[tuple]:
        """Identifies the socket that is at the path now: another sluiced binds a new one."""
        try:
            at = os.stat(self.path)
        except OSError:
            return None
        return at.st_dev, at.st_ino

    async def _unless_replaced(self, call: Awaitable, bound: Optional[tuple]) -> Any:
        """Waits for a call to sluiced, until another sluiced has taken the place of a hanging one."""
        task = asyncio.ensure_future(call)
        try:
            while not (await asyncio.wait([task], timeout=SILENCE))[0]:
                if self._socket_identity() not in (None, bound):
                    raise EOFError("sluiced hangs, and another sluiced has taken its place")
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
            await send(sock, {"kind": "held", "id": id}, [l.sock.fileno() for l in listeners])

    def _obey(self, message: dict, sockets: list[socket.socket]) -> Optional[dict]:
        kind = message["kind"]
        if kind == "hello":
            self.node = message.get("node", "")
            log(logging.INFO, "connected to sluiced at %s", self.path)
        elif kind == "attach":
            if len(sockets) != len(message["listeners"]):
                raise ValueError(f"{len(sockets)} sockets for {len(message['listeners'])} listeners")
            self.listeners.attach(message["id"], [
                Listener(s, message["pod"], l["direction"]) for s, l in zip(sockets, message["listeners"])
            ])
        elif kind == "detach":
            self.listeners.detach(message["id"])
            return {"kind": "detached", "id": message["id"]}
        elif kind == "ping":
            return {"kind": "state", "connections": self.connections()}
        elif kind == "error":
            raise ValueError(message.get("error", "sluiced refuses"))
        return None  # a later version may send other kinds of messages


class Writer(asyncio.StreamWriter):
    """A StreamWriter that reports another address for its peer."""

    peername: tuple

    @classmethod
    def of(cls, writer: asyncio.StreamWriter, peername: tuple) -> "Writer":
        # A second StreamWriter would not do: the garbage collector would close the transport with the first one.
        writer.__class__ = cls
        writer.peername = peername
        return writer

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self.peername if name == "peername" else super().get_extra_info(name, default)


def pod_address(peername: tuple, ips: Sequence[str]) -> tuple:
    """Replaces the address of a container nested in the pod, which is not unique, by the pod's own address."""
    if peername[0] in ips:
        return peername
    for ip in ips:
        if (":" in ip) == (":" in peername[0]):
            return (ip, *peername[1:])
    return peername


def forbidden(destination: tuple, local: tuple) -> str:
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


def own(peername: tuple, pod: tuple) -> bool:
    """Reports whether the proxy itself opened a connection to a pod. Forwarded, it would come back without end."""
    family = socket.AF_INET6 if ":" in peername[0] else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as s:
        try:
            s.connect((pod[0], 9))  # on UDP this only looks up the route, and sends no packet
        except OSError:
            return False  # no route
        return s.getsockname()[0] == peername[0]


def front(master) -> Callable[[asyncio.StreamReader, Any], Awaitable[None]]:
    """Returns the function that serves one accepted connection as mitmproxy's transparent mode does.

    It works in this version of mitmproxy, in any mode of mitmproxy's own server.
    """
    server = master.addons.get("proxyserver")
    if not hasattr(server, "handle_tcp_connection"):
        return newer_front(server)

    from mitmproxy.addons.proxyserver import ProxyConnectionHandler
    from mitmproxy.proxy import layers

    async def serve(reader: asyncio.StreamReader, writer: Any) -> None:
        # The same steps as the server's own handle_tcp_connection, which would take the top layer from the option
        # `mode`.
        id = ("tcp", writer.get_extra_info("peername"), writer.get_extra_info("sockname"))
        handler = ProxyConnectionHandler(master, reader, writer, ctx.options)
        handler.layer = layers.modes.TransparentProxy(handler.layer.context)
        server._connections[id] = handler
        await server.handle_connection(id)

    return serve


def newer_front(server) -> Callable[[asyncio.StreamReader, Any], Awaitable[None]]:
    """The same for mitmproxy 9 to 12. Written from their sources and tested with stubs, not with those versions.

    A server instance has a mode and serves one stream. In a mode derived from TransparentMode it reads the original
    destination from the socket.
    """
    from mitmproxy.proxy import layers, mode_servers, mode_specs

    class SluiceMode(mode_specs.TransparentMode):
        description = "sockets from sluice"

    class SluiceInstance(mode_servers.ServerInstance[SluiceMode]):
        is_running = True
        listen_addrs = ()

        def make_top_layer(self, context):
            return layers.modes.TransparentProxy(context)

        async def start(self):
            pass

        async def stop(self):
            pass

        _start, _stop = start, stop

    instance = SluiceInstance(SluiceMode.parse("sluice"), server)
    return getattr(instance, "handle_stream", None) or instance.handle_tcp_connection  # the name before 10.1


class Sluice:
    """The addon."""

    def __init__(self) -> None:
        self.clients: dict[str, dict] = {}  # facts of the pod, by the ID of the client's connection
        self.tasks: set[asyncio.Task] = set()
        self.listeners = Listeners(self.serve)
        self.session: Optional[Session] = None
        self.talking: Optional[asyncio.Task] = None
        self.front: Optional[Callable] = None
        self.serving = 0  # number of connections
        self.room = 0  # number of further connections for which there are descriptors, at least

    def load(self, loader) -> None:
        loader.add_option(
            "sluice_socket", str, "/run/sluice/proxy.sock",
            "Unix socket of sluiced, which hands over the listening sockets of pods. Empty: do not connect to it.",
        )
        loader.add_option("sluice_labels", Sequence[str], [], "Pod labels to add to the metadata of flows.")
        loader.add_option(
            "sluice_relays", Sequence[str], ["127.0.0.0/8", "::1/128", os.environ.get("HOST_IP", "")],
            "Addresses from which sluiced connects when it relays. Sluice- headers of CONNECT requests from other "
            "addresses are ignored. If the proxy runs in a pod that does not use the host's network, this is the "
            "address from which the node connects to the pod: with many CNI plugins, the pod's gateway.",
        )

    def running(self) -> None:
        if not ctx.options.sluice_socket or self.session:
            return
        self.front = front(ctx.master)
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        self.session = Session(
            ctx.options.sluice_socket, ctx.options.sluice_labels, self.listeners, lambda: len(self.clients),
        )
        self.talking = self.spawn(self.session.run())

    def done(self) -> None:
        if self.talking:
            self.talking.cancel()  # established connections continue
        self.listeners.close()

    def spawn(self, coroutine) -> asyncio.Task:
        task = asyncio.get_running_loop().create_task(coroutine)
        self.tasks.add(task)  # asyncio keeps weak references only: the garbage collector could end the task
        task.add_done_callback(self.tasks.discard)
        return task

    # From a listening socket to mitmproxy.

    def serve(self, conn: socket.socket, listener: Listener) -> None:
        self.serving += 1
        self.room -= 1
        if not self.has_room():
            self.listeners.pause()
            self.wait_for_room()
        self.spawn(self._serve(conn, listener))

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
        free = limit - len(os.listdir("/proc/self/fd")) - self.serving - RESERVE
        self.room = free // 3  # counted again after so many connections

    def wait_for_room(self) -> None:
        if self.has_room():
            self.listeners.resume()
        else:
            asyncio.get_running_loop().call_later(0.1, self.wait_for_room)

    async def _serve(self, conn: socket.socket, listener: Listener) -> None:
        writer = None
        try:
            if self._refuse(conn, listener):
                return
            conn.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            reader, writer = await asyncio.open_connection(sock=conn)
            current.set(listener.facts(self.session.node))
            peer = writer.get_extra_info("peername")
            known = peer if listener.direction == "inbound" else pod_address(peer, listener.pod["ips"])
            await self.front(reader, writer if known == peer else Writer.of(writer, known))
        except Exception as e:
            log(logging.ERROR, "%s: connection ended: %r", listener.pod["name"], e)
        finally:
            (writer or conn).close()  # mitmproxy leaves it to the garbage collector if the client ends first
            self.serving -= 1

    def _refuse(self, conn: socket.socket, listener: Listener) -> bool:
        """Reports whether conn must not be served. If so, the caller closes it, and it ends in the right way."""
        mine = False
        try:
            destination = platform.original_addr(conn)
            mine = listener.direction == "inbound" and own(conn.getpeername(), destination)
            reason = "the proxy itself opened it" if mine else forbidden(destination, conn.getsockname())
        except OSError as e:
            reason = str(e)
        if not reason:
            return False
        log(logging.WARNING, "%s: connection refused: %s", listener.pod["name"], reason)
        # The proxy's own connection ends without a reset: mitmproxy 8 loops without end if a connection that it has
        # opened is reset before it has asked for the peer's address.
        if not mine:
            conn.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close() sends a reset
        return True

    def client_connected(self, client) -> None:
        facts = current.get()
        if facts:
            self.clients[client.id] = facts

    def client_disconnected(self, client) -> None:
        self.clients.pop(client.id, None)

    # From a connection to its flows.

    def mark(self, flow) -> None:
        facts = self.clients.get(flow.client_conn.id)
        if facts:
            flow.metadata.update(facts)
            flow.comment = facts["sluice.pod"] + (f" on {facts['sluice.node']}" if facts["sluice.node"] else "")
            if facts["sluice.direction"] == "inbound":
                flow.comment += ", inbound"

    def requestheaders(self, flow) -> None:
        self.mark(flow)

    def tcp_start(self, flow) -> None:
        self.mark(flow)

    def http_connect(self, flow) -> None:
        """Reads the pod's name from the headers of a CONNECT request of a sluiced that relays, and removes them."""
        names = ("Pod-Namespace", "Pod-Name", "Pod-UID", "Source", "Direction")
        headers = {name: flow.request.headers.pop(f"Sluice-{name}", "") for name in names}
        if headers["Pod-Name"] and self.trusted(flow.client_conn.peername[0]):
            pod = {"namespace": headers["Pod-Namespace"], "name": headers["Pod-Name"], "uid": headers["Pod-UID"]}
            facts = Listener(None, pod, headers["Direction"] or "outbound").facts("")
            if headers["Source"]:
                facts["sluice.source"] = headers["Source"]
            self.clients[flow.client_conn.id] = facts
        self.mark(flow)

    def trusted(self, address: str) -> bool:
        """Reports whether sluiced may connect from an address, according to the option sluice_relays."""
        ip = ipaddress.ip_address(address)
        ip = getattr(ip, "ipv4_mapped", None) or ip
        return any(ip in ipaddress.ip_network(n) for n in ctx.options.sluice_relays if n)


addons = [Sluice()]
