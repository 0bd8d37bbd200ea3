"""sluice, for mitmproxy: accept the connections of pods in their own network namespaces.

    mitmdump -s sluice.py

In any mode, for those who use mitmproxy explicitly; add `--set server=false` if nobody does. sluiced, with `upstream.protocol: sockets`, hands over the sockets that listen in the netns of each captured pod. This
addon accepts on them. There is no relay between the pod and mitmproxy, which sees the pod's own address, and
while mitmproxy is not there connections wait in the kernel. With the protocol `connect`, where sluiced relays, the
same addon takes from its CONNECT requests which pod it is.

Flows say which pod they come from, in their comment (`~comment ci/`) and in their metadata (`~meta ci/`):
sluice.pod, sluice.namespace, sluice.name, sluice.uid, sluice.node, sluice.direction, sluice.labels.

Needs nothing but mitmproxy 8.1 or later. docs/proxies.md in the repository of sluice describes the protocol.
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
SILENCE = 5  # seconds; sluiced says something every second
RESERVE = 16  # descriptors for whatever else

# Beside the link-local ones, the addresses at which clouds serve a node's credentials.
METADATA = {ipaddress.ip_address("fd00:ec2::254"), ipaddress.ip_address("fd20:ce::254")}


def log(level: int, text: str, *args: Any) -> None:
    """To where this version of mitmproxy shows it."""
    if version.VERSION.startswith("8."):
        ctx.log("sluice: " + text % args, logging.getLevelName(level).lower().replace("warning", "warn"))
    else:
        logging.log(level, "sluice: " + text, *args)


# The facts of the pod whose connection the current task serves.
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
    """What sluiced has handed over, by its id, and the accepting on it."""

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
        """Leave what comes where it is: it waits in the kernel."""
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
        if listener.sock.fileno() >= 0 and not self.paused:  # not closed meanwhile
            asyncio.get_running_loop().add_reader(listener.sock, self._accept, listener)

    def _accept(self, listener: Listener) -> None:
        # One at a time: others that share the queue take the next. To listen again, as asyncio's servers do, would
        # shrink the queue for everybody.
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
            return  # else it was shut: the word to let go of it is on its way
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
            raise EOFError("sluiced has gone")
        return json.loads(data), fds


class Session:
    """The conversation with sluiced. It begins again for ever; what is held meanwhile stays."""

    def __init__(self, path: str, labels: Sequence[str], listeners: Listeners, connections: Callable[[], int]):
        self.path = path
        self.labels = list(labels)
        self.listeners = listeners
        self.connections = connections
        self.node = ""

    async def run(self) -> None:
        said = ""
        while True:
            try:
                await self._talk()
            except (OSError, EOFError, ValueError, KeyError) as e:
                if said != repr(e):
                    log(logging.WARNING, "%s: %s; trying again", self.path, e)
                said = repr(e)
            await asyncio.sleep(RECONNECT)

    async def _talk(self) -> None:
        loop = asyncio.get_running_loop()
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.setblocking(False)
            bound = self._socket()
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

    def _socket(self) -> Optional[tuple]:
        """Which socket is at the path now."""
        try:
            at = os.stat(self.path)
        except OSError:
            return None
        return at.st_dev, at.st_ino

    async def _unless_replaced(self, what: Awaitable, bound: Optional[tuple]) -> Any:
        """Waits for sluiced for as long as no other has taken its place."""
        task = asyncio.ensure_future(what)
        try:
            while not (await asyncio.wait([task], timeout=SILENCE))[0]:
                if self._socket() not in (None, bound):
                    raise EOFError("sluiced hangs, and another has taken its place")
            return task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)  # it lets go of the socket before that is closed

    async def _greet(self, sock: socket.socket) -> None:
        held = list(self.listeners.held.items())
        with open("/proc/self/ns/net", "rb") as network:  # so that what comes from there is known to be the proxy's own
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
        return None  # what a later version may say besides is not for us


class Writer(asyncio.StreamWriter):
    """A StreamWriter whose other end is known by another address."""

    peername: tuple

    @classmethod
    def of(cls, writer: asyncio.StreamWriter, peername: tuple) -> "Writer":
        writer.__class__ = cls  # a second one would close the transport when the first is collected
        writer.peername = peername
        return writer

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self.peername if name == "peername" else super().get_extra_info(name, default)


def pod_address(peername: tuple, ips: Sequence[str]) -> tuple:
    """The pod's own address in place of that of a container nested in it, which other pods may have as well."""
    if peername[0] in ips:
        return peername
    for ip in ips:
        if (":" in ip) == (":" in peername[0]):
            return (ip, *peername[1:])
    return peername


def forbidden(destination: tuple, local: tuple) -> str:
    """Why the proxy may not connect to a destination in a pod's name: it means something else where the proxy is."""
    ip = ipaddress.ip_address(destination[0])
    ip = getattr(ip, "ipv4_mapped", None) or ip
    if destination[:2] == local[:2]:
        return "it was not redirected"
    if ip.is_loopback or ip.is_unspecified:
        return "it would be the proxy's own loopback"
    if ip.is_link_local or ip in METADATA:
        return "it would be asked in the node's name"
    if ip.is_multicast or ip == ipaddress.ip_address("255.255.255.255"):
        return "it is not a unicast address"
    return ""


def own(peername: tuple, pod: tuple) -> bool:
    """Whether the proxy itself has made a connection to a pod: passed on, it would come back for ever."""
    family = socket.AF_INET6 if ":" in peername[0] else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as s:
        try:
            s.connect((pod[0], 9))  # looks the route up, and sends nothing
        except OSError:
            return False  # there is no way to it
        return s.getsockname()[0] == peername[0]


def front(master) -> Callable[[asyncio.StreamReader, Any], Awaitable[None]]:
    """What serves one accepted connection in this version of mitmproxy, whatever mode its own server is in."""
    server = master.addons.get("proxyserver")
    if not hasattr(server, "handle_tcp_connection"):
        return newer_front(server)

    from mitmproxy.addons.proxyserver import ProxyConnectionHandler
    from mitmproxy.proxy import layers

    async def serve(reader: asyncio.StreamReader, writer: Any) -> None:
        # As the server's own handle_tcp_connection, which would take the top layer from the option `mode`.
        id = ("tcp", writer.get_extra_info("peername"), writer.get_extra_info("sockname"))
        handler = ProxyConnectionHandler(master, reader, writer, ctx.options)
        handler.layer = layers.modes.TransparentProxy(handler.layer.context)
        server._connections[id] = handler
        await server.handle_connection(id)

    return serve


def newer_front(server) -> Callable[[asyncio.StreamReader, Any], Awaitable[None]]:
    """mitmproxy 9 to 12. Written by their sources and tested against stand-ins for the names it uses, not run with them.

    A server instance has a mode and serves one stream; in a mode derived from TransparentMode it finds the original
    destination of the socket itself.
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
    return getattr(instance, "handle_stream", None) or instance.handle_tcp_connection  # its name until 10.1


class Sluice:
    def __init__(self) -> None:
        self.clients: dict[str, dict] = {}  # facts, by the id of the client's connection
        self.tasks: set[asyncio.Task] = set()
        self.listeners = Listeners(self.serve)
        self.session: Optional[Session] = None
        self.talking: Optional[asyncio.Task] = None
        self.front: Optional[Callable] = None
        self.serving = 0  # connections
        self.room = 0  # for so many more, at least

    def load(self, loader) -> None:
        loader.add_option("sluice_socket", str, "/run/sluice/proxy.sock", "Where sluiced hands sockets over; empty for not at all.")
        loader.add_option("sluice_labels", Sequence[str], [], "Labels of pods that flows shall show.")
        loader.add_option(
            "sluice_relays", Sequence[str], ["127.0.0.0/8", "::1/128", os.environ.get("HOST_IP", "")],
            "Addresses whose Sluice- headers on CONNECT are believed: sluiced's own. To a proxy in a pod with a network of its "
            "own, that is the address from which the node reaches the pod, with many CNI plugins the pod's gateway.",
        )

    def running(self) -> None:
        if not ctx.options.sluice_socket or self.session:
            return
        self.front = front(ctx.master)
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        self.session = Session(ctx.options.sluice_socket, ctx.options.sluice_labels, self.listeners, lambda: len(self.clients))
        self.talking = self.spawn(self.session.run())

    def done(self) -> None:
        if self.talking:
            self.talking.cancel()  # connections go on
        self.listeners.close()

    def spawn(self, what) -> asyncio.Task:
        task = asyncio.get_running_loop().create_task(what)
        self.tasks.add(task)  # asyncio itself does not keep it
        task.add_done_callback(self.tasks.discard)
        return task

    # From the socket to mitmproxy.

    def serve(self, conn: socket.socket, listener: Listener) -> None:
        self.serving += 1
        self.room -= 1
        if not self.has_room():
            self.listeners.pause()
            self.wait_for_room()
        self.spawn(self._serve(conn, listener))

    def has_room(self) -> bool:
        """Whether one more can be accepted: without a descriptor for its server, mitmproxy would end it."""
        if self.room <= 0:
            self.count_room()
        if self.room <= 0:
            gc.collect()  # mitmproxy leaves connections to servers to it
            self.count_room()
        return self.room > 0

    def count_room(self) -> None:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        free = limit - len(os.listdir("/proc/self/fd")) - self.serving - RESERVE  # some may still have no server
        self.room = free // 3  # until they are counted again

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
            (writer or conn).close()  # mitmproxy leaves one that the client has ended first to the garbage collector
            self.serving -= 1

    def _refuse(self, conn: socket.socket, listener: Listener) -> bool:
        """Whether conn is not to be served; how it ends is seen to."""
        mine = False
        try:
            destination = platform.original_addr(conn)
            mine = listener.direction == "inbound" and own(conn.getpeername(), destination)
            why = "the proxy itself has made it" if mine else forbidden(destination, conn.getsockname())
        except OSError as e:
            why = str(e)
        if not why:
            return False
        log(logging.WARNING, "%s: connection refused: %s", listener.pod["name"], why)
        if not mine:  # mitmproxy 8 goes on for ever with one of its own that is reset before it has asked for its peer
            conn.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
        return True

    def client_connected(self, client) -> None:
        facts = current.get()
        if facts:
            self.clients[client.id] = facts

    def client_disconnected(self, client) -> None:
        self.clients.pop(client.id, None)

    # From the connection to its flows.

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
        """sluiced relays: which pod it is for stands in the headers."""
        headers = {h: flow.request.headers.pop(f"Sluice-{h}", "") for h in ("Pod-Namespace", "Pod-Name", "Pod-UID", "Source", "Direction")}
        if headers["Pod-Name"] and self.believed(flow.client_conn.peername[0]):
            pod = {"namespace": headers["Pod-Namespace"], "name": headers["Pod-Name"], "uid": headers["Pod-UID"]}
            facts = Listener(None, pod, headers["Direction"] or "outbound").facts("")
            if headers["Source"]:
                facts["sluice.source"] = headers["Source"]
            self.clients[flow.client_conn.id] = facts
        self.mark(flow)

    def believed(self, address: str) -> bool:
        ip = ipaddress.ip_address(address)
        ip = getattr(ip, "ipv4_mapped", None) or ip
        return any(ip in ipaddress.ip_network(n) for n in ctx.options.sluice_relays if n)


addons = [Sluice()]
