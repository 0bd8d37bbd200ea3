"""Tests the code of deploy/mitmproxy/sluice.py for mitmproxy 9 to 12 with stubs for exactly the names that it uses.

    newer_mitmproxy.py ADDON 9|12

The stubs treat a server instance as those versions do: its mode must be registered under a unique name, and
handle_stream reads the original destination from the socket if the mode is a TransparentMode.
"""
import asyncio
import importlib.util
import socket
import sys
import types
from typing import Generic, TypeVar, get_args


def module(name, **names):
    m = types.ModuleType(name)
    m.__dict__.update(names)
    sys.modules[name] = m
    return m


class ProxyMode:
    modes = {}

    def __init_subclass__(cls):
        cls.type_name = cls.__name__.removesuffix("Mode").lower()
        assert cls.type_name not in ProxyMode.modes
        ProxyMode.modes[cls.type_name] = cls

    @classmethod
    def parse(cls, spec):
        mode = ProxyMode.modes[spec]
        assert issubclass(mode, cls)
        return mode()


class TransparentMode(ProxyMode):
    pass


M = TypeVar("M", bound=ProxyMode)


class ServerInstance(Generic[M]):
    instances = {}

    def __init__(self, mode, manager):
        self.mode, self.manager = mode, manager

    def __init_subclass__(cls):
        mode = get_args(cls.__orig_bases__[0])[0]
        assert mode.type_name not in ServerInstance.instances
        ServerInstance.instances[mode.type_name] = cls

    async def serve(self, reader, writer):
        layer = self.make_top_layer("context")
        assert isinstance(self.mode, TransparentMode)
        assert isinstance(writer, asyncio.StreamWriter)
        destination = platform.original_addr(writer.get_extra_info("socket"))
        self.manager.served.append((layer, destination, writer.get_extra_info("peername")))


# The method has another name in older versions.
setattr(ServerInstance, {"9": "handle_tcp_connection", "12": "handle_stream"}[sys.argv[2]], ServerInstance.serve)


class TransparentProxy:
    def __init__(self, context):
        self.context = context


class Proxyserver:
    served = []


class Master:
    class addons:
        @staticmethod
        def get(name):
            return {"proxyserver": server}[name]


server = Proxyserver()
platform = module("mitmproxy.platform", original_addr=lambda sock: ("192.0.2.1", 443))
modes = module("mitmproxy.proxy.layers.modes", TransparentProxy=TransparentProxy)
layers = module("mitmproxy.proxy.layers", modes=modes)
mode_specs = module("mitmproxy.proxy.mode_specs", TransparentMode=TransparentMode)
mode_servers = module("mitmproxy.proxy.mode_servers", ServerInstance=ServerInstance)
module("mitmproxy.proxy", layers=layers, mode_servers=mode_servers, mode_specs=mode_specs)
module(
    "mitmproxy", platform=platform, proxy=sys.modules["mitmproxy.proxy"],
    version=types.SimpleNamespace(VERSION=sys.argv[2] + ".0.0"),
    ctx=types.SimpleNamespace(options=types.SimpleNamespace(mode=["regular"])),
)

spec = importlib.util.spec_from_file_location("sluice", sys.argv[1])
sluice = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sluice)

serve = sluice.front(Master)
pod = ("10.0.0.5", 40000)


async def connection():
    """Passes a connection of a container nested in a pod to mitmproxy, as the addon does."""
    a, b = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=a)
    await serve(reader, sluice.Writer.of(writer, pod))
    writer.close()
    b.close()


asyncio.run(connection())
(layer, destination, peername), = server.served
assert isinstance(layer, TransparentProxy) and layer.context == "context", layer
assert destination == ("192.0.2.1", 443), destination
assert peername == pod, peername
instance = serve.__self__
assert instance.is_running and instance.listen_addrs == () and instance.mode.description
asyncio.run(instance.start())
asyncio.run(instance.stop())
print("ok")
