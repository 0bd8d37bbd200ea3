"""Unit tests of the addon. integration/mitmproxy and integration/sockets test it with sluiced and real pods."""

from __future__ import annotations

import array
import asyncio
import contextlib
import datetime
import errno
import gc
import ipaddress
import json
import os
import resource
import socket
import struct
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from mitmproxy import certs, options, platform
from mitmproxy.addons.proxyauth import ProxyAuth
from mitmproxy.addons.proxyserver import Proxyserver
from mitmproxy.addons.tlsconfig import TlsConfig
from mitmproxy.addons.view import View
from mitmproxy.connection import ConnectionState
from mitmproxy.test import taddons, tflow
from mitmproxy.utils import human

import sluice

POD = {"namespace": "ci", "name": "runner", "uid": "u1", "ips": ["10.0.0.5", "fd00::5"]}


@contextlib.contextmanager
def mitmproxy(*addons: Any) -> Iterator[tuple[sluice.Sluice, Any]]:
    """Loads the addon, beside others of mitmproxy."""
    addon = sluice.Sluice()
    with taddons.context(*addons, addon, options=options.Options()) as context:
        yield addon, context


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, 20))


async def until(condition: Any) -> None:
    """Waits for a condition. run() bounds the wait."""
    while not condition():
        await asyncio.sleep(0.01)


def seqpacket() -> tuple[socket.socket, socket.socket]:
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in pair:
        end.setblocking(False)
    return pair


def listening() -> socket.socket:
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    sock.listen(8)
    return sock


def connect(sock: socket.socket) -> socket.socket:
    return socket.create_connection(sock.getsockname()[:2], timeout=10)


# Messages.


def test_messages_carry_sockets() -> None:
    async def talk() -> None:
        ours, theirs = seqpacket()
        with ours, theirs, listening() as sock:
            await sluice.send(theirs, {"kind": "attach"}, [sock.fileno()])
            message, (received,) = await sluice.receive(ours)
            with received:
                assert message == {"kind": "attach"}
                assert received.getsockname() == sock.getsockname()
            theirs.close()
            with pytest.raises(EOFError):
                await sluice.receive(ours)

    run(talk())


def test_message_waits_for_room_in_the_socket() -> None:
    async def talk() -> None:
        ours, theirs = seqpacket()
        with ours, theirs:
            sent = 0
            with contextlib.suppress(BlockingIOError):
                while True:
                    ours.send(b"{}")
                    sent += 1
            last = asyncio.ensure_future(sluice.send(ours, {"kind": "last"}))
            for _ in range(sent):
                assert (await sluice.receive(theirs))[0] == {}
            await last
            assert (await sluice.receive(theirs))[0] == {"kind": "last"}

    run(talk())


def test_sockets_of_a_lost_message_are_closed() -> None:
    async def talk() -> None:
        ours, theirs = seqpacket()
        with ours, theirs, listening() as sock:
            before = len(os.listdir("/proc/self/fd"))
            await sluice.send(theirs, {"kind": "attach"}, [sock.fileno()])
            await sluice.receive(ours)  # as in a task that has been cancelled meanwhile
            gc.collect()
            assert len(os.listdir("/proc/self/fd")) == before

    run(talk())


# Listeners.


def listener(sock: socket.socket) -> sluice.Listener:
    return sluice.Listener(sock, POD, "outbound")


def test_listeners_accept_pause_and_resume() -> None:
    async def accept() -> None:
        served: list[socket.socket] = []
        listeners = sluice.Listeners(lambda conn, _: served.append(conn))
        sock = listening()
        listeners.attach("a", [listener(sock)])
        clients = [connect(sock)]
        await until(lambda: len(served) == 1)
        listeners.pause()
        clients.append(connect(sock))
        for _ in range(10):
            await asyncio.sleep(0)
        assert len(served) == 1
        listeners.resume()
        await until(lambda: len(served) == 2)
        listeners.close()
        assert sock.fileno() == -1 and not listeners.held
        for s in clients + served:
            s.close()

    run(accept())


def test_attach_replaces_the_sockets_of_the_same_id() -> None:
    async def attach() -> None:
        listeners = sluice.Listeners(lambda conn, _: conn.close())
        old, new = listening(), listening()
        listeners.attach("a", [listener(old)])
        listeners.attach("a", [listener(new)])
        assert old.fileno() == -1 and new.fileno() >= 0
        listeners.detach("a")
        listeners.detach("a")
        assert new.fileno() == -1

    run(attach())


def test_a_listener_without_descriptors_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    class Exhausted:
        def __init__(self) -> None:
            self.tried = 0

        def accept(self) -> None:
            self.tried += 1
            raise OSError(errno.EMFILE, "too many open files")

    async def accept() -> None:
        listeners = sluice.Listeners(lambda conn, _: conn.close())
        watched: list[Any] = []
        later: list[tuple[Any, ...]] = []
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(loop, "remove_reader", watched.append)
        monkeypatch.setattr(loop, "call_later", lambda *call: later.append(call))
        exhausted: Any = Exhausted()
        held = listener(exhausted)
        listeners._accept(held)
        assert watched == [exhausted]
        assert later == [(1, listeners._watch, held)]

    run(accept())


# The connection to sluiced.


class Sluiced:
    """A sluiced that takes one proxy after the other, and offers each the same socket."""

    def __init__(self, path: Path, sock: socket.socket):
        self.sock = sock
        self.hellos: list[dict[str, Any]] = []
        self.states: list[int] = []
        self.server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.server.setblocking(False)
        self.server.bind(str(path))
        self.server.listen(8)

    async def hello(self, conn: socket.socket) -> dict[str, Any]:
        while True:
            with contextlib.suppress(BlockingIOError):
                data, (network,), _, _ = socket.recv_fds(conn, sluice.MAX_MESSAGE, 16)
                with open(network, "rb"):
                    assert os.fstat(network).st_ino == os.stat("/proc/self/ns/net").st_ino
                hello: dict[str, Any] = json.loads(data)
                return hello
            await asyncio.sleep(0.01)

    async def serve(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            conn, _ = await loop.sock_accept(self.server)
            with conn, contextlib.suppress(EOFError, OSError):
                self.hellos.append(await self.hello(conn))
                await sluice.send(conn, {"kind": "hello", "version": 1, "node": "n1"})
                described = {"kind": "attach", "id": "a", "pod": POD, "listeners": [{"direction": "outbound"}]}
                await sluice.send(conn, described, [self.sock.fileno()])
                await sluice.send(conn, {"kind": "something new"})
                while True:
                    await sluice.send(conn, {"kind": "ping"})
                    state, _ = await sluice.receive(conn)
                    self.states.append(state["connections"])
                    await asyncio.sleep(0.01)


def test_a_second_instance_takes_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def reload() -> None:
        served: list[tuple[sluice.Facts, asyncio.StreamReader, Any]] = []

        async def serve(self: sluice.Front, reader: asyncio.StreamReader, writer: Any) -> None:
            facts = sluice.Kept.of(self.master).current.get()
            assert facts
            served.append((facts[0], reader, writer))
            while data := await reader.read(100):
                writer.write(data)

        async def echo(client: socket.socket) -> bytes:
            client.send(b"hello")
            client.setblocking(False)
            return await asyncio.get_running_loop().sock_recv(client, 100)

        monkeypatch.setattr(sluice.Front, "serve", serve, raising=False)
        monkeypatch.setattr(sluice.Front, "__init__", lambda self, master: setattr(self, "master", master))
        monkeypatch.setattr(platform, "original_addr", lambda conn: ("192.0.2.1", 80))
        sock = listening()
        sluiced = Sluiced(tmp_path / "proxy.sock", sock)
        serving = asyncio.ensure_future(sluiced.serve())
        with mitmproxy(Proxyserver(), ProxyAuth()) as (first, context):
            context.configure(first, sluice_socket=str(tmp_path / "proxy.sock"))
            first.running()
            await until(lambda: first.listeners.held)
            kept = connect(sock)
            assert await echo(kept) == b"hello"

            context.master.addons.remove(first)
            waits = connect(sock)
            second = sluice.Sluice()
            context.master.addons.add(second)
            second.running()
            await until(lambda: second.listeners.held)
            assert not first.listeners.held
            assert await echo(kept) == b"hello"
            assert await echo(waits) == b"hello"
            assert [facts["sluice.pod"] for facts, _, _ in served] == ["ci/runner"] * 2
            assert [facts["sluice.node"] for facts, _, _ in served] == ["n1"] * 2
            await until(lambda: sluiced.states[-1] == 2)
            assert [hello["held"] for hello in sluiced.hellos] == [0, 0]
            for client in (kept, waits):
                client.close()
            await until(lambda: sluiced.states[-1] == 0)
            second.done()
        serving.cancel()
        sluiced.server.close()
        sock.close()

    run(reload())


def test_an_older_instance_has_kept_less() -> None:
    older = SimpleNamespace(tasks=set(), current=object())
    master = SimpleNamespace(sluice=older)
    first = sluice.Kept.of(master)
    assert first.tasks is older.tasks and first.current is older.current
    assert sluice.Kept.of(master).refusals is first.refusals


def test_options_keep_their_values_when_their_description_changes() -> None:
    with mitmproxy() as (addon, context):
        context.configure(addon, sluice_socket="/elsewhere", sluice_flows=7)
        context.master.options._options["sluice_socket"].help = "as an earlier version described it"
        context.master.addons.remove(addon)
        context.master.addons.add(sluice.Sluice())
        assert context.options.sluice_socket == "/elsewhere"
        assert context.options.sluice_flows == 7
        assert context.options.sluice_labels == []


# Facts.


def test_facts() -> None:
    with socket.socket() as sock:
        facts = sluice.Listener(sock, {**POD, "labels": {"app": "x"}}, "inbound").facts("n1", "192.0.2.1")
    assert facts == {
        "sluice.pod": "ci/runner", "sluice.namespace": "ci", "sluice.name": "runner", "sluice.uid": "u1",
        "sluice.node": "n1", "sluice.direction": "inbound", "sluice.labels": {"app": "x"},
    }
    assert "sluice.labels" not in sluice.facts_of(POD, "outbound", "")


@pytest.mark.parametrize(
    ("peer", "trust", "reason"),
    [
        ("172.17.0.2", "trusted", ""),
        ("172.17.0.3", "files-only", "nested, trust files-only"),
        ("172.17.0.4", "unknown", "nested, trust unknown"),
        ("10.0.0.5", None, "trust unknown"),
    ],
)
def test_nested_containers_with_the_ca(peer: str, trust: str | None, reason: str) -> None:
    containers = {"172.17.0.2": "trusted", "172.17.0.3": "files-only"}
    pod = {**POD, "trust": "unknown", "tls": "pass", "nested": "pass", "containers": containers}
    with socket.socket() as sock:
        facts = sluice.Listener(sock, pod, "outbound").facts("", peer)
    assert facts.get("sluice.container_trust") == trust
    assert sluice.reason_to_pass(facts, True) == reason
    assert sluice.learns(facts)


@pytest.mark.parametrize(
    ("peer", "direction", "nested", "policy"),
    [
        ("10.0.0.5", "outbound", None, "pass"),
        ("fd00::5", "outbound", None, "pass"),
        ("127.0.0.1", "outbound", None, "pass"),
        ("::1", "outbound", None, "pass"),
        ("172.17.0.2", "outbound", True, "inspect"),
        ("192.0.2.1", "inbound", None, "pass"),
    ],
)
def test_facts_about_trust(peer: str, direction: str, nested: bool | None, policy: str) -> None:
    pod = {**POD, "trust": "trusted", "tls": "pass", "nested": "inspect"}
    with socket.socket() as sock:
        facts = sluice.Listener(sock, pod, direction).facts("n1", peer)
    assert (facts.get("sluice.nested"), facts["sluice.tls"]) == (nested, policy)
    assert facts["sluice.trust"] == "trusted"


def test_a_new_description_of_a_pod() -> None:
    async def describe() -> None:
        listeners = sluice.Listeners(lambda conn, _: conn.close())
        session = sluice.Session("", [], listeners, lambda: 0)
        held = [listener(listening()), listener(listening())]
        listeners.attach("a", held)
        pod = {**POD, "trust": "trusted"}
        assert session._obey({"kind": "pod", "id": "a", "pod": pod}, []) is None
        assert session._obey({"kind": "pod", "id": "gone", "pod": {}}, []) is None
        assert [each.pod for each in held] == [pod, pod]
        listeners.close()

    run(describe())


def test_trust_is_unknown_without_sluiced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sluice, "SILENCE", 0.05)
    monkeypatch.setattr(sluice, "RECONNECT", 0.01)

    async def lose() -> None:
        listeners = sluice.Listeners(lambda conn, _: conn.close())
        trusting, strict, older = [listener(listening()) for _ in range(3)]
        trusting.pod = {**POD, "trust": "trusted", "tls": "pass"}
        strict.pod = {**POD, "trust": "trusted", "tls": "inspect"}
        for id, each in (("a", trusting), ("b", strict), ("c", older)):
            listeners.attach(id, [each])
        path = tmp_path / "proxy.sock"
        session = sluice.Session(str(path), [], listeners, lambda: 0)

        def reason(each: sluice.Listener) -> str:
            return sluice.reason_to_pass(session.facts(each, POD["ips"][0]), True)

        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sluiced:
            sluiced.bind(str(path))
            sluiced.listen()
            sluiced.setblocking(False)
            assert not reason(trusting)
            talking = asyncio.ensure_future(session.run())
            conn, _ = await asyncio.get_running_loop().sock_accept(sluiced)
            await until(lambda: session.silent)
            monkeypatch.setattr(sluice, "SILENCE", 60)
            assert [reason(each) for each in (trusting, strict, older)] == ["trust unknown", "", ""]
            await sluice.send(conn, {"kind": "hello", "node": "n1"})
            await until(lambda: session.node and not session.silent)
            assert not reason(trusting)
            conn.close()
            await until(lambda: reason(trusting))
            assert [reason(each) for each in (trusting, strict, older)] == ["trust unknown", "", ""]
            conn, _ = await asyncio.get_running_loop().sock_accept(sluiced)
            await sluice.send(conn, {"kind": "hello", "node": "n2"})
            await until(lambda: session.node == "n2")
            assert reason(trusting)  # until it is described again
            await sluice.send(conn, {"kind": "pod", "id": "a", "pod": {**POD, "trust": "trusted", "tls": "pass"}})
            await until(lambda: not reason(trusting))
            conn.close()
        talking.cancel()
        listeners.close()

    run(lose())


@pytest.mark.parametrize(
    ("direction", "node", "comment"),
    [
        ("outbound", "n1", "ci/runner on n1"),
        ("inbound", "n1", "ci/runner on n1, inbound"),
        ("outbound", "", "ci/runner"),
    ],
)
def test_flows_show_their_pod(direction: str, node: str, comment: str) -> None:
    with mitmproxy(ProxyAuth()) as (addon, _):
        writer: Any = object()
        addon.kept.current.set((sluice.facts_of(POD, direction, node), writer))
        for hook, flow in (
            (addon.requestheaders, tflow.tflow()), (addon.tcp_start, tflow.ttcpflow()),
            (addon.dns_request, tflow.tdnsflow()),
        ):
            addon.client_connected(flow.client_conn)
            hook(flow)
            assert flow.comment == comment
            assert flow.metadata["sluice.direction"] == direction
            run(addon.client_disconnected(flow.client_conn))
            assert not hasattr(flow.client_conn, "sluice_writer")
            assert flow.get_state()["client_conn"]["peername"]  # a file can be written


def test_other_flows_stay_as_they_are() -> None:
    with mitmproxy() as (addon, _):
        flow = tflow.tflow()
        addon.client_connected(flow.client_conn)
        addon.requestheaders(flow)
        assert flow.comment == "" and not flow.metadata


def test_pods_need_no_credentials() -> None:
    auth = ProxyAuth()
    with mitmproxy(auth) as (addon, context):
        context.configure(auth, proxyauth="user:secret")
        writer: Any = object()
        flow = tflow.tflow()
        auth.requestheaders(flow)
        assert flow.response
        addon.kept.current.set((sluice.facts_of(POD, "outbound", ""), writer))
        flow = tflow.tflow()
        addon.client_connected(flow.client_conn)
        auth.requestheaders(flow)
        assert not flow.response


@pytest.mark.parametrize(("mode", "warns"), [(["regular"], False), (["upstream:http://proxy:3128"], True)])
def test_upstream_mode_is_warned_of(mode: list[str], warns: bool, caplog: pytest.LogCaptureFixture) -> None:
    with mitmproxy(Proxyserver(), ProxyAuth()) as (addon, context):
        context.options.update(mode=mode)
        addon.warn()
    assert ("--mode upstream" in caplog.text) == warns


def test_the_address_shows_the_pod() -> None:
    port = sluice.Port(40000, "ci/runner")
    assert f"10.0.0.5:{port}" == "10.0.0.5:40000 ci/runner"
    assert json.dumps(["10.0.0.5", port]) == '["10.0.0.5", 40000]'
    assert str(port) == f"{port:d}" == "40000" and port == 40000


def test_mitmproxys_cache_tells_pods_apart() -> None:
    ports = [40000, sluice.Port(40000, "ci/a"), sluice.Port(40000, "ci/b")]
    shown = [human.format_address(("10.0.0.5", port)) for port in ports]
    assert shown == ["10.0.0.5:40000", "10.0.0.5:40000 ci/a", "10.0.0.5:40000 ci/b"]


@pytest.mark.parametrize(
    ("host", "shown"),
    [("10.0.0.5", "10.0.0.5"), ("172.17.0.2", "10.0.0.5"), ("fd00:1::2", "fd00::5"), ("fd00::5", "fd00::5")],
)
def test_nested_containers_show_the_pods_address(host: str, shown: str) -> None:
    assert sluice.pod_address(host, ["10.0.0.5", "fd00::5"]) == shown
    assert sluice.pod_address("fd00:1::2", ["10.0.0.5"]) == "fd00:1::2"


# Connections that are not served.


@pytest.mark.parametrize(
    ("destination", "word"),
    [
        (("192.0.2.1", 443), ""),
        (("2001:db8::1", 443, 0, 0), ""),
        (("10.0.0.5", 15001), "redirected"),
        (("10.0.0.5", 80), ""),
        (("127.0.0.1", 80), "loopback"),
        (("::1", 80, 0, 0), "loopback"),
        (("0.0.0.0", 80), "loopback"),
        (("::ffff:127.0.0.1", 80, 0, 0), "loopback"),
        (("169.254.169.254", 80), "link-local"),
        (("fe80::1", 80, 0, 2), "link-local"),
        (("fd00:ec2::254", 80, 0, 0), "metadata"),
        (("fd20:ce::254", 80, 0, 0), "metadata"),
        (("224.0.0.1", 80), "unicast"),
        (("255.255.255.255", 80), "unicast"),
    ],
)
def test_forbidden(destination: tuple[Any, ...], word: str) -> None:
    reason = sluice.forbidden(destination, ("10.0.0.5", 15001))
    assert word in reason and bool(reason) == bool(word)


@pytest.mark.parametrize(
    ("destination", "word"),
    [
        (("192.0.2.1", 443), ""),
        (("fd00:ec2::253", 443, 0, 0), ""),
        (("168.63.129.16", 80), "service"),
        (("::ffff:100.100.100.200", 80, 0, 0), "service"),
        (("127.0.0.1", 80), "loopback"),  # stands for another address of this machine
    ],
)
def test_destinations_that_mean_the_node(destination: tuple[Any, ...], word: str) -> None:
    reason = sluice.means_node(destination)
    assert word in reason and bool(reason) == bool(word)


def test_own_connections_are_recognised() -> None:
    assert sluice.own(("127.0.0.1", 1), ("127.0.0.1", 80))
    assert not sluice.own(("192.0.2.7", 1), ("127.0.0.1", 80))


@pytest.mark.parametrize("with_reset", [False, True])
def test_a_client_that_has_gone(with_reset: bool) -> None:
    with listening() as sock:
        client = connect(sock)
        conn, _ = sock.accept()
        with conn:
            assert not sluice.gone(conn)
            if with_reset:
                sluice.reset_at_close(client)
            client.close()
            assert sluice.gone(conn)


SECRET = "a1" * 32


def connect_flow(headers: dict[str, str]) -> Any:
    """Returns a flow of CONNECT with headers of sluiced, or of a client that forges them."""
    flow = tflow.tflow()
    flow.client_conn.peername = ("127.0.0.1", 5)
    flow.request.headers.update({f"Sluice-{name}": value for name, value in headers.items()})
    return flow


@pytest.mark.parametrize(
    ("kept", "sent", "pod"),
    [
        (SECRET, SECRET, "ci/runner"),
        (SECRET + "\n", SECRET, "ci/runner"),
        (SECRET, "", None),
        (SECRET, SECRET[:-1], None),
        (SECRET, "\udce9", None),
        ("", "", None),
        (None, "", None),
        (None, SECRET, None),
    ],
)
def test_names_of_a_relay(tmp_path: Path, kept: str | None, sent: str, pod: str | None) -> None:
    with mitmproxy() as (addon, context):
        context.configure(addon, sluice_socket=str(tmp_path / "proxy.sock"))
        if kept is not None:
            (tmp_path / sluice.SECRET_FILE).write_text(kept)
        flow = connect_flow({"Secret": sent, "Pod-Namespace": "ci", "Pod-Name": "runner", "Pod-UID": "u"})
        addon.http_connect(flow)
        assert flow.metadata.get("sluice.pod") == pod
        assert not [name for name in flow.request.headers if name.lower().startswith("sluice-")]


def test_no_secret_without_a_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / sluice.SECRET_FILE).write_text(SECRET)
    monkeypatch.chdir(tmp_path)
    with mitmproxy() as (addon, context):
        context.configure(addon, sluice_socket="")
        assert not addon.knows(SECRET)


@pytest.mark.parametrize(
    ("headers", "facts"),
    [
        ({}, {}),
        ({"Trust": "unknown"}, {"sluice.trust": "unknown", "sluice.tls": "pass"}),
        ({"Trust": "trusted", "TLS": "inspect"}, {"sluice.trust": "trusted", "sluice.tls": "inspect"}),
        (
            {"Trust": "trusted", "TLS": "inspect", "Nested": "true"},
            {"sluice.trust": "trusted", "sluice.tls": "inspect", "sluice.nested": True},
        ),
    ],
)
def test_trust_by_a_relay(tmp_path: Path, headers: dict[str, str], facts: dict[str, Any]) -> None:
    (tmp_path / sluice.SECRET_FILE).write_text(SECRET)
    for secret in (SECRET, "forged"):
        with mitmproxy() as (addon, context):
            context.configure(addon, sluice_socket=str(tmp_path / "proxy.sock"))
            flow = connect_flow({"Secret": secret, "Pod-Name": "runner", **headers})
            addon.http_connect(flow)
            about = {name: value for name, value in flow.metadata.items()
                     if name in ("sluice.trust", "sluice.tls", "sluice.nested")}
            assert about == (facts if secret == SECRET else {})
            assert not [name for name in flow.request.headers if name.lower().startswith("sluice-")]


# TLS that is passed through.


@pytest.mark.parametrize(
    ("pod", "direction", "nested", "reason", "learns"),
    [
        ({}, "outbound", False, "", False),
        ({}, "outbound", True, "", False),
        ({"trust": "trusted"}, "outbound", False, "", True),
        ({"trust": "trusted", "tls": "pass"}, "outbound", False, "", True),
        ({"trust": "unknown", "tls": "pass"}, "outbound", False, "trust unknown", True),
        ({"trust": "files-only", "tls": "pass"}, "outbound", False, "trust files-only", True),
        ({"trust": "unknown", "tls": "inspect"}, "outbound", False, "", False),
        ({"trust": "trusted", "tls": "inspect"}, "outbound", False, "", False),
        ({"trust": "trusted", "tls": "pass", "nested": "pass"}, "outbound", True, "nested", True),
        ({"trust": "unknown", "tls": "pass", "nested": "inspect"}, "outbound", True, "", False),
        ({"trust": "trusted", "tls": "inspect", "nested": "pass"}, "outbound", True, "nested", True),
        ({"trust": "trusted", "tls": "inspect"}, "outbound", True, "", False),
        ({"trust": "trusted", "tls": "pass"}, "inbound", False, "inbound", True),
        ({"trust": "trusted", "tls": "inspect"}, "inbound", False, "", False),
    ],
)
def test_reason_to_pass(pod: dict[str, str], direction: str, nested: bool, reason: str, learns: bool) -> None:
    facts = sluice.facts_of({**POD, **pod}, direction, "", nested)
    assert (sluice.reason_to_pass(facts, True), sluice.learns(facts)) == (reason, learns)
    outside = reason or "not in the zones of the CA" if learns else ""
    assert sluice.reason_to_pass(facts, False) == outside


def test_two_refusals_in_a_row_are_learned() -> None:
    now = 1000.0
    refusals = sluice.Refusals(lambda: now)
    assert not refusals.passes("u1", "a.example")
    assert not refusals.refused("u1", "a.example")
    assert not refusals.passes("u1", "a.example")
    refusals.accepted("u1", "a.example")
    assert not refusals.refused("u1", "a.example")
    assert refusals.refused("u1", "a.example")
    assert refusals.passes("u1", "a.example")
    assert not refusals.refused("u1", "a.example")  # a connection that was on its way
    assert not refusals.passes("u1", "b.example")
    assert not refusals.passes("u2", "a.example")
    now += sluice.REFUSAL_LASTS
    assert not refusals.passes("u1", "a.example")
    assert not refusals.refused("u1", "a.example")
    assert not refusals.passes("u1", "a.example")


def test_refusals_are_bounded() -> None:
    refusals = sluice.Refusals()
    for _ in range(2):
        refusals.refused("victim", "a.example")
    for i in range(1000):
        refusals.refused("flood", f"{i}.example")
    assert len(refusals.pods["flood"]) == sluice.REFUSED_NAMES
    assert refusals.passes("victim", "a.example")
    for i in range(1000):
        refusals.refused(f"u{i}", "a.example")
    assert len(refusals.pods) == sluice.REFUSED_PODS


ALERTS = [
    "tlsv1 alert unknown ca", "sslv3 alert bad certificate", "ssl/tls alert bad certificate",
    "OpenSSL Error([('SSL routines', '', 'sslv3 alert certificate unknown')])",
    "OpenSSL Error([('SSL routines', '', 'ssl/tls alert certificate expired')])",
    "OpenSSL Error([('SSL routines', 'ssl3_read_bytes', 'sslv3 alert unsupported certificate')])",
]
SILENT = "The client disconnected during the handshake. If this happens consistently for x, this may indicate"


@pytest.mark.parametrize(
    ("error", "by_client", "how"),
    [
        *(zip(ALERTS, [False] * 6, [  # noqa: B905 - strict= needs Python 3.10
            "alert unknown ca", "alert bad certificate", "alert bad certificate", "alert certificate unknown",
            "alert certificate expired", "alert unsupported certificate",
        ])),
        (SILENT, True, "end during the handshake"),
        (SILENT, False, ""),
        ("connection closed early", True, ""),
        ("OpenSSL Error([('SSL routines', '', 'no shared cipher')])", True, ""),
        ("OpenSSL Error([('SSL routines', '', 'tlsv1 alert protocol version')])", True, ""),
        ("OpenSSL Error([('SSL routines', '', 'tlsv13 alert certificate required')])", True, ""),
        ("Client and mitmproxy cannot agree on a TLS version to use.", True, ""),
        ("Cannot parse ClientHello: 16030100", True, ""),
        ("", False, ""),
    ],
)
def test_failures_of_the_handshake(error: str, by_client: bool, how: str) -> None:
    transport = SimpleNamespace(reader=asyncio.StreamReader.__new__(asyncio.StreamReader), writer=None)
    inspected = sluice.Inspected("u1", "a.example", transport, None)
    inspected.ended_by_client = by_client
    assert inspected.failed(error) == how


@pytest.mark.parametrize(
    ("end", "server", "notified", "ago", "refused"),
    [
        ("client", ConnectionState.OPEN, False, 0.0, True),
        ("client", None, False, 0.0, True),
        ("reset", ConnectionState.OPEN, False, 0.0, True),
        ("proxy", ConnectionState.OPEN, True, 0.0, True),
        ("proxy", ConnectionState.OPEN, False, 0.0, False),
        ("client", ConnectionState.CAN_WRITE, False, 0.0, False),
        ("reset", ConnectionState.CLOSED, False, 0.0, False),
        ("client", ConnectionState.OPEN, False, sluice.REFUSAL_CLOSES + 1, False),
        ("client", ConnectionState.OPEN, False, None, False),
    ],
)
def test_silence_after_the_handshake(end: str, server: ConnectionState | None, notified: bool, ago: float | None,
                                     refused: bool) -> None:
    async def close() -> None:
        with listening() as sock:
            client = connect(sock)
            conn, peer = sock.accept()
        conn.setblocking(False)
        reader, writer = await sluice.Writer.open(conn, peer)
        to = SimpleNamespace(timestamp_start=None if server is None else 1.0, state=server)
        inspected = sluice.Inspected("u1", "a.example", SimpleNamespace(reader=reader, writer=writer), to)
        if ago is not None:
            inspected.tls = SimpleNamespace(get_shutdown=lambda: 2 if notified else 0)
            inspected.established = time.monotonic() - ago
        if end == "reset":
            sluice.reset_at_close(client)
        (writer if end == "proxy" else client).close()
        with contextlib.suppress(ConnectionResetError):
            await reader.read()
        assert inspected.closed() == ("end after the handshake" if refused else "")
        writer.close()
        client.close()

    run(close())


class Hello:
    """What mitmproxy tells the hook tls_clienthello."""

    def __init__(self, facts: sluice.Facts | None, sni: str | None = "a.example"):
        flow = tflow.ttcpflow()
        self.context = SimpleNamespace(client=flow.client_conn, server=flow.server_conn)
        self.client_hello = SimpleNamespace(sni=sni)
        self.ignore_connection = False
        if facts:
            vars(flow.client_conn)["sluice_facts"] = facts


@contextlib.contextmanager
def with_ca(folder: Path) -> Iterator[tuple[sluice.Sluice, Any, Any]]:
    config = TlsConfig()
    with mitmproxy(config) as (addon, context):
        context.configure(config, confdir=str(folder))
        yield addon, context, config


def trust(level: str, policy: str = "pass") -> sluice.Facts:
    return sluice.facts_of({**POD, "trust": level, "tls": policy}, "outbound", "n1")


def test_passed_connections_are_flows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    view = View()
    with with_ca(tmp_path) as (addon, context, _):
        context.master.addons.add(view)
        hello = Hello(trust("unknown"))
        run(addon.tls_clienthello(hello))
        assert hello.ignore_connection
        (flow,) = view
        assert flow.comment == "ci/runner on n1, TLS passed through: trust unknown"
        assert flow.metadata["sluice.passed"] == "trust unknown"
        passed = vars(flow.client_conn)["sluice_passed"]
        passed.up, passed.down = 5, 7
        run(addon.client_disconnected(flow.client_conn))
        assert flow.comment.endswith(": trust unknown, 5 bytes up, 7 down")
        assert (flow.metadata["sluice.up"], flow.metadata["sluice.down"]) == (5, 7)
        assert not flow.messages and not flow.killable
        assert "passed through: ci/runner to" in caplog.text and "5 bytes up, 7 down" in caplog.text


def test_lines_of_the_log_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")

    async def flood() -> None:
        lines = sluice.Lines(20, "TLS passed through")
        for i in range(sluice.LINES + 3):
            lines.add("ci/a", f"to {i}.example")
        lines.add("ci/b", "to b.example")
        assert caplog.text.count("TLS passed through: ci/a to ") == sluice.LINES
        assert "ci/b" not in caplog.text
        await until(lambda: "more connections in one second: 3 of ci/a, 1 of ci/b" in caplog.text)
        lines.add("ci/b", "to b.example")
        assert "TLS passed through: ci/b to b.example" in caplog.text
        caplog.clear()
        lines.end_second()
        assert not caplog.text  # there were no more

    run(flood())


def test_bytes_of_a_passed_connection_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[bytes] = []
    transports: dict[Any, Any] = {}
    monkeypatch.setattr(sluice, "transport_of", lambda _, connection: transports.get(connection))
    with with_ca(tmp_path) as (addon, _, _):
        hello = Hello(trust("unknown"))
        client, server = hello.context.client, hello.context.server
        transports[client] = SimpleNamespace(writer=SimpleNamespace(write=written.append), reader=None)
        run(addon.tls_clienthello(hello))
        transports[server] = SimpleNamespace(writer=SimpleNamespace(write=written.append), reader=None)
        addon.server_connected(SimpleNamespace(client=client, server=server))
        transports[client].writer.write(b"down")
        transports[server].writer.write(b"up")
        passed = vars(client)["sluice_passed"]
        assert (passed.up, passed.down, written) == (2, 4, [b"down", b"up"])


class Attempts:
    """Clients of pods that try TLS, each with one connection."""

    def __init__(self, addon: sluice.Sluice, monkeypatch: pytest.MonkeyPatch):
        self.addon = addon
        self.reader: Any = asyncio.StreamReader.__new__(asyncio.StreamReader)
        writer: Any = SimpleNamespace(write=None, is_closing=lambda: False)
        monkeypatch.setattr(sluice, "transport_of", lambda *_: SimpleNamespace(reader=self.reader, writer=writer))

    def passes(self, facts: sluice.Facts, error: str = "", request: bool = False, hangs_up: bool = False,
               sni: str | None = "a.example") -> bool:
        """Reports whether TLS of a client is passed through. Otherwise it does as told."""

        async def attempt() -> bool:
            hello = Hello(facts, sni)
            client: Any = hello.context.client
            client.sni = sni
            await self.addon.tls_clienthello(hello)
            if error:
                client.error = error
                self.addon.tls_failed_client(SimpleNamespace(context=hello.context, conn=client))
            if hangs_up:
                established = SimpleNamespace(get_shutdown=lambda: 2)
                self.addon.tls_established_client(SimpleNamespace(context=hello.context, ssl_conn=established))
            if request:
                flow = tflow.tflow()
                flow.client_conn = client
                self.addon.requestheaders(flow)
            await self.addon.client_disconnected(client)
            assert not vars(self.reader).keys() & {"feed_data", "feed_eof", "set_exception"}
            return hello.ignore_connection

        return bool(run(attempt()))


def test_clients_that_refuse_are_passed_until_one_accepts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with with_ca(tmp_path) as (addon, _, _):
        passes = Attempts(addon, monkeypatch).passes
        trusted, strict = trust("trusted"), trust("trusted", "inspect")
        assert [passes(trusted, ALERTS[0]) for _ in range(3)] == [False, False, True]
        assert not passes(trusted, sni=None) and not passes(strict)
        assert [passes(trusted, ALERTS[0], sni=None) for _ in range(3)] == [False, False, True]  # by address
        assert [passes(strict, ALERTS[0], sni="b.example") for _ in range(3)] == [False] * 3
        assert not passes(trusted, sni="b.example")  # nothing was counted
        for _ in range(3):
            assert not passes(trusted, ALERTS[0], sni="c.example")
            assert not passes(trusted, request=True, sni="c.example")
        assert not passes(trusted, ALERTS[0], sni="d.example")
        assert not passes(strict, request=True, sni="d.example")  # it does not count, as refusals do not
        assert not passes(trusted, ALERTS[0], sni="d.example")
        assert passes(trusted, sni="d.example")


def test_each_refusal_has_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                 caplog: pytest.LogCaptureFixture) -> None:
    nested = sluice.facts_of({**POD, "trust": "trusted", "nested": "inspect"}, "outbound", "n1", True)
    inbound = sluice.facts_of({**POD, "trust": "unknown", "tls": "inspect"}, "inbound", "n1")
    with with_ca(tmp_path) as (addon, _, _):
        attempts = Attempts(addon, monkeypatch)

        def lines(facts: sluice.Facts, **does: Any) -> list[str]:
            caplog.clear()
            assert not attempts.passes(facts, **does)
            addon.refused_lines.end_second()  # the loop of its timer has ended
            return [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]

        line = "sluice: certificate refused: ci/runner to %s (address:22), %s"
        for facts, by in ((trust("trusted"), ""), (trust("unknown", "inspect"), ""), (nested, ", nested"),
                          (inbound, ", inbound")):
            for _ in range(3):
                for does, how in (({"error": ALERTS[0]}, "alert unknown ca"),
                                  ({"hangs_up": True}, "end after the handshake")):
                    assert lines(facts, **does) == [line % ("a.example", how + by)]
                    assert not lines(facts, request=True)
        assert lines(trust("trusted"), error=ALERTS[1], sni=None) == [line % ("no SNI", "alert bad certificate")]
        assert not lines(trust("trusted"), error="connection closed early")
        assert not lines(sluice.facts_of(POD, "outbound", "n1"), error=ALERTS[0])  # an older sluiced


# The CA.


def write_ca(folder: Path, name: str, key: Any = None, identifier: bytes | None = b"an identifier",
             constraints: dict[str, list[x509.GeneralName]] | None = None) -> bytes:
    """Writes a CA as mitmproxy reads it: a key, an intermediate and a root. Returns the file's content.

    constraints are the subtrees that each of the two certificates permits, by its name.
    """
    root_key, made_key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())

    def certificate(subject: str, issuer: str, of: Any, by: Any) -> bytes:
        def named(n: str) -> x509.Name:
            return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, n)])

        now = datetime.datetime.now()
        builder = x509.CertificateBuilder(
            named(issuer), named(subject), of.public_key(), x509.random_serial_number(),
            now - datetime.timedelta(days=1), now + datetime.timedelta(days=1),
        ).add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        if identifier:
            builder = builder.add_extension(x509.SubjectKeyIdentifier(identifier), critical=False)
        if constraints and subject in constraints:
            builder = builder.add_extension(x509.NameConstraints(constraints[subject], None), critical=True)
        return builder.sign(by, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    content = (key or made_key).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption(),
    ) + certificate(name, "root", made_key, root_key) + certificate("root", "root", root_key, root_key)
    new = folder / "new"
    new.write_bytes(content)
    new.rename(folder / "mitmproxy-ca.pem")
    return bytes(content)


def leaf(config: TlsConfig) -> Any:
    store: Any = config.certstore  # names have another type from 12 on
    return store.get_cert("a.example", ["a.example"]).cert


def test_the_ca_is_loaded_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = write_ca(tmp_path, "first")
    file = tmp_path / "mitmproxy-ca.pem"
    with with_ca(tmp_path) as (addon, context, config):
        addon.authority.refresh()
        entry = config.certstore.get_cert("a.example", ["a.example"])
        assert dict(entry.cert.issuer)["CN"] == "first"
        assert entry.chain_file.read_bytes() == first
        store = config.certstore
        addon.authority.refresh()
        assert config.certstore is store and leaf(config) is entry.cert
        config.certstore.certs["own.example"] = entry  # as the option `certs` does

        second = write_ca(tmp_path, "second")
        addon.authority.refresh()
        entry = config.certstore.get_cert("a.example", ["a.example"])
        assert dict(entry.cert.issuer)["CN"] == "second"
        assert entry.chain_file.read_bytes() == second
        assert dict(config.certstore.get_cert("own.example", []).cert.issuer)["CN"] == "first"

        for broken in (b"", second[:300], second[:-300], b"no PEM"):
            caplog.clear()
            file.write_bytes(broken)
            addon.authority.refresh()
            addon.authority.refresh()
            assert caplog.text.count("cannot be used, the CA stays") == 1
            assert dict(leaf(config).issuer)["CN"] == "second"
        caplog.clear()
        write_ca(tmp_path, "third", key=ec.generate_private_key(ec.SECP256R1()))
        addon.authority.refresh()
        assert "the key is not that" in caplog.text
        file.unlink()
        addon.authority.refresh()
        assert dict(leaf(config).issuer)["CN"] == "second"
        write_ca(tmp_path, "fourth")
        addon.authority.refresh()
        assert dict(leaf(config).issuer)["CN"] == "fourth"

        config.configure({"confdir"})  # as mitmproxy does when that option changes
        addon.authority.refresh()
        assert config.certstore.get_cert("a.example", ["a.example"]).chain_file != file


EXAMPLE: list[x509.GeneralName] = [x509.DNSName("example.com"), x509.DNSName("Example.ORG")]
WWW: list[x509.GeneralName] = [x509.DNSName("www.example.com")]
NETWORK: list[x509.GeneralName] = [x509.IPAddress(ipaddress.ip_network("192.0.2.0/24"))]


@pytest.mark.parametrize(
    ("constraints", "permitted", "others"),
    [
        ({}, ["a.example", None], []),
        ({"ca": EXAMPLE, "root": EXAMPLE},
         ["example.com", "A.B.Example.COM", "example.com.", "www.example.org"],
         ["notexample.com", "com", "example.net", "192.0.2.1", "", None]),
        ({"root": EXAMPLE}, ["example.com"], ["example.net", None]),
        ({"ca": WWW, "root": EXAMPLE}, ["a.www.example.com"], ["example.com", "www.example.org"]),
        ({"ca": WWW, "root": [x509.DNSName("example.org")]}, [], ["www.example.com", "example.org"]),
        ({"root": [x509.DNSName(".example.com")]}, ["a.example.com"], ["example.com", "a.example.org"]),
        ({"root": [x509.DNSName("")]}, ["a.example"], []),
        ({"root": NETWORK}, ["a.example", None], []),
        ({"root": [*NETWORK, *WWW]}, ["www.example.com"], ["a.example", None]),
    ],
)
def test_names_that_the_ca_permits(constraints: dict[str, list[x509.GeneralName]], permitted: list[str | None],
                                   others: list[str | None], tmp_path: Path) -> None:
    write_ca(tmp_path, "ca", constraints=constraints)
    with with_ca(tmp_path) as (addon, _, _):
        addon.authority.refresh()
        assert [name for name in permitted + others if addon.authority.permits(name)] == permitted


def test_names_outside_of_the_zones_are_passed(tmp_path: Path) -> None:
    with with_ca(tmp_path) as (addon, _, _):
        def passed(facts: sluice.Facts | None, sni: str | None) -> Any:
            hello = Hello(facts, sni)
            run(addon.tls_clienthello(hello))
            made = vars(hello.context.client).get("sluice_passed")
            assert hello.ignore_connection == bool(made)
            return made and made.reason

        trusted, outside = trust("trusted"), "not in the zones of the CA"
        for constraints in ({"root": EXAMPLE}, {}, {"root": WWW}):  # as the file changes
            write_ca(tmp_path, "ca", constraints=constraints)
            for sni in ("a.example", None):
                assert passed(trusted, sni) == (outside if constraints else None)
                assert not passed(trust("trusted", "inspect"), sni)
                assert not passed(sluice.facts_of(POD, "outbound", "n1"), sni)
                assert not passed(None, sni)
                assert passed(trust("unknown"), sni) == "trust unknown"
            assert not passed(trusted, "www.example.com")
        (tmp_path / "mitmproxy-ca.pem").write_bytes(b"no PEM")
        assert passed(trusted, "a.example") == outside  # the CA stays, with its zones


@pytest.mark.parametrize("identifier", [b"an identifier", None])
def test_leaves_name_their_issuer(tmp_path: Path, identifier: bytes | None) -> None:
    write_ca(tmp_path, "ca", identifier=identifier)
    with with_ca(tmp_path) as (addon, _, config):
        addon.authority.refresh()
        issuer, made = config.certstore.default_ca._cert, leaf(config)._cert
        of_leaf = made.extensions.get_extension_for_class(x509.AuthorityKeyIdentifier).value.key_identifier
        key: Any = issuer.public_key()
        want = identifier or x509.SubjectKeyIdentifier.from_public_key(key).digest
        assert of_leaf == want
        key.verify(made.signature, made.tbs_certificate_bytes, ec.ECDSA(hashes.SHA256()))
        names = made.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        assert names.get_values_for_type(x509.DNSName) == ["a.example"]
    with mitmproxy():
        replaced: Any = certs.dummy_cert
        assert not hasattr(replaced.sluice_replaces, "sluice_replaces")  # loaded twice, replaced once


# Descriptors.


def test_room(monkeypatch: pytest.MonkeyPatch) -> None:
    async def serve() -> None:
        with mitmproxy() as (addon, _):
            gc.collect()  # descriptors that earlier tests have left
            limit = len(os.listdir("/proc/self/fd")) + sluice.RESERVE + 9
            monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
            assert addon.has_room() and addon.room == 3
            tasks: Any = {asyncio.get_running_loop().create_future() for _ in range(9)}
            addon.kept.tasks = tasks
            addon.room = 0
            assert not addon.has_room()
            addon.listeners.pause()
            addon.wait_for_room()
            assert addon.listeners.paused
            addon.kept.tasks.clear()
            await until(lambda: not addon.listeners.paused)

    run(serve())


# The end of the connection to an app.


async def app_connection() -> tuple[socket.socket, sluice.Writer]:
    with listening() as sock:
        client = connect(sock)
        conn, peer = sock.accept()
    conn.setblocking(False)
    _, writer = await sluice.Writer.open(conn, peer)
    return client, writer


def end(client: socket.socket) -> bytes | None:
    """Reads to the end. None stands for a reset."""
    data = b""
    with client:
        try:
            while more := client.recv(100):
                data += more
        except ConnectionResetError:
            return None
    return data


def server(error: str | None, connected: float | None) -> Any:
    return SimpleNamespace(error=error, timestamp_tcp_setup=connected)


def broken() -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    reader.set_exception(ConnectionResetError())
    return reader


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize(
    ("error", "connected", "is_reset", "seen"),
    [
        (None, 1.0, False, b""),
        (None, 1.0, True, None),
        ("connection refused", None, False, None),
        ("certificate verify failed", 1.0, False, b""),
    ],
)
def test_end_of_an_app(half: bool, error: str | None, connected: float | None, is_reset: bool,
                       seen: bytes | None) -> None:
    async def close() -> None:
        client, writer = await app_connection()
        writer.connecting(server(error, connected))
        if is_reset:
            writer.server_reader = broken()
        if half:
            writer.write_eof()
        else:
            writer.close()
        assert await asyncio.to_thread(end, client) == seen
        writer.close()

    run(close())


def test_an_error_page_arrives() -> None:
    async def close() -> None:
        client, writer = await app_connection()
        writer.connecting(server("connection refused", None))
        writer.write(b"502")
        writer.close()
        assert await asyncio.to_thread(end, client) == b"502"

    run(close())


def test_linger_is_on_for_a_reset() -> None:
    with socket.socket() as sock:
        sluice.reset_at_close(sock)
        linger = sock.getsockopt(socket.SOL_SOCKET, socket.SO_LINGER, 8)
        assert struct.unpack("ii", linger) == (1, 0)
        assert array.array("i", linger).tolist() == [1, 0]


# Memory.


def test_the_oldest_finished_flows_are_forgotten() -> None:
    view = View()
    with mitmproxy(view) as (addon, context):
        context.configure(addon, sluice_flows=10)
        flows = [tflow.tflow(resp=True) for _ in range(15)]
        for flow in flows:
            flow.live = False
        flows[0].live = True
        flows[1].marked = ":star:"
        for flow in flows:
            view.add([flow])
            addon.started(flow)
        kept = view.resolve("@all")
        assert len(kept) == 10
        assert kept == flows[:2] + flows[7:]
        assert not flows[0].error  # it goes on


def test_all_flows_are_kept_by_default() -> None:
    view = View()
    with mitmproxy(view) as (addon, _):
        for _ in range(50):
            flow = tflow.tflow(resp=True)
            view.add([flow])
            addon.started(flow)
        assert view.store_count() == 50


@pytest.mark.parametrize(("size", "at_most"), [(1, sluice.HEAD_MESSAGES + 16), (64 << 10, 20)])
def test_long_conversations_keep_their_head(size: int, at_most: int) -> None:
    with mitmproxy() as (addon, context):
        for flows, complete in ((0, True), (10, False)):
            context.configure(addon, sluice_flows=flows)
            flow: Any = tflow.ttcpflow()
            flow.messages = []
            for i in range(2000):
                flow.messages.append(
                    SimpleNamespace(content=bytes([i % 256]) * size, number=i, from_client=True),
                )
                addon.tcp_message(flow)
                assert flow.messages[-1].number == i
            dropped = flow.metadata.get("sluice.dropped", 0)
            assert dropped + sum(len(m.content) for m in flow.messages) == 2000 * size
            assert (len(flow.messages) == 2000) == complete == (dropped == 0)
            if not complete:
                assert len(flow.messages) <= at_most
                assert [m.number for m in flow.messages[:-1]] == list(range(len(flow.messages) - 1))
