"""NIXL as a transport: UCX between nodes, copies through the kernel on one machine.

The C++ bindings are loaded beside their Python package, whose older versions import torch; a pool
must restart fast. An agent is named by node and epoch, so that a peer never mistakes a restarted
pool for the old one. The progress thread is off, because it burns a whole core when idle and halves
the speed on a small machine: whoever owns the transport polls.

Between processes of one machine UCX reads with `process_vm_readv` and does so inside `start_read`,
which then blocks for as long as the copy takes, without the GIL. Over other wires it returns at
once.

UCX listens on every network interface unless told otherwise. `devices` restricts it (`lo` for a
pool that listens on 127.0.0.1, see `devices_for`); UCX's own variable `UCX_NET_DEVICES` overrides
it.

A process that made a UCX agent crashes in its ordinary exit (NIXL 1.5.1): end it with `os._exit`.
"""

import importlib.util
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from ...fabric.errors import Closed, Conservation, Malformed, Unsupported
from .transport import ReadItem, ReadState, Segment, Transport

PACKAGES = ("nixl_cu13", "nixl_cu12", "nixl_rocm", "nixl")
"""The wheels that hold the bindings. For host memory they are alike."""
REMEDY = "Install the wheel nixl (with nixl-cu12 or nixl-cu13), or set peers.transport to none."


def devices_for(listen: str) -> str:
    """Return the UCX devices for an address such as `tcp://127.0.0.1:*`: `lo`, or "" for all."""
    host = urlsplit(listen.replace("*", "0")).hostname or ""
    if host == "localhost":
        return "lo"
    try:
        return "lo" if ip_address(host).is_loopback else ""
    except ValueError:
        return ""


def load_bindings() -> Any:
    """Return NIXL's C++ module, loaded without its Python package. Raises `Unsupported`."""
    problems: list[str] = []
    for package in PACKAGES:
        name = f"{package}._bindings"
        if name in sys.modules:
            return sys.modules[name]
        spec = _find(package, name)
        if spec is None or spec.loader is None:
            continue
        try:
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        except (ImportError, OSError) as error:
            problems.append(f"{package}: {error}")
            continue
        sys.modules[name] = module
        return module
    found = "; ".join(problems) or f"none of {', '.join(PACKAGES)} is installed"
    raise Unsupported("peers.transport", f"nixl ({found})", REMEDY)


def _find(package: str, name: str) -> ModuleSpec | None:
    """Find a module of a package without running the package."""
    try:
        parent = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None
    if parent is None or parent.submodule_search_locations is None:
        return None
    return PathFinder.find_spec(name, parent.submodule_search_locations)


@dataclass(slots=True)
class _Read:
    request: int
    """NIXL's; 0 if it refused to make one."""
    state: ReadState


class NixlTransport(Transport):
    """A NIXL agent with the UCX backend. See the module's text and `Transport`."""

    def __init__(self, node: str, epoch: int, devices: str = "") -> None:
        """Make the agent. Raises `Unsupported` if NIXL or its UCX plugin cannot be used."""
        self.name = f"{node}.{epoch}"
        nixl = self._nixl = load_bindings()
        self._errors = tuple(
            value
            for name in dir(nixl)
            if name.startswith("nixl")
            and name.endswith("Error")
            and issubclass(value := getattr(nixl, name), Exception)
        )
        config = nixl.nixlAgentConfig()
        config.useProgThread, config.useListenThread = False, False
        parameters = {"engine_config": f"NET_DEVICES={devices}"} if devices else {}
        try:
            self._agent = nixl.nixlAgent(self.name, config)
            self._backend = self._agent.createBackend("UCX", parameters)
        except self._errors as error:
            raise Unsupported("peers.transport", f"nixl (UCX: {error!r})", REMEDY) from error
        self._registered: list[Any] = []
        self._peers: set[str] = set()
        self._reads: dict[int, _Read] = {}
        self._handle = 0
        self._closed = False

    def metadata(self) -> bytes:
        """Return the agent's name, connection and registrations, as NIXL serialises them."""
        self._require_open()
        return bytes(self._agent.getLocalMD())

    def register(self, segments: Sequence[Segment]) -> None:
        """Register host memory with UCX. Raises `Unsupported` if it cannot be registered."""
        self._require_open()
        regions = [(segment.address, segment.length_bytes, 0, "") for segment in segments]
        descriptors = self._nixl.nixlRegDList(self._nixl.DRAM_SEG, regions)
        try:
            self._agent.registerMem(descriptors, [self._backend])
        except self._errors as error:
            raise Unsupported(
                "peers.transport", f"nixl (registration: {error!r})", "Raise the memlock limit."
            ) from error
        self._registered.append(descriptors)

    def add_peer(self, agent: bytes) -> str:
        """Load a peer's metadata. Raises `Malformed`."""
        self._require_open()
        try:
            peer = self._agent.loadRemoteMD(agent).decode()
        except self._errors as error:
            raise Malformed("agent metadata", repr(error)) from error
        self._peers.add(peer)
        return peer

    def remove_peer(self, peer: str) -> None:
        """Drop a peer's metadata and connection."""
        self._require_open()
        if peer in self._peers:
            self._peers.remove(peer)
            self._agent.invalidateRemoteMD(peer)

    def start_read(self, peer: str, items: Sequence[ReadItem]) -> int:
        """Post a READ of all items. Blocks while it copies if the peer is on this machine."""
        self._require_open()
        nixl = self._nixl
        local = [(item.local_address, item.length_bytes, 0) for item in items]
        remote = [(item.remote_address, item.length_bytes, 0) for item in items]
        self._handle += 1
        read = self._reads[self._handle] = _Read(0, ReadState.FAILED)
        try:
            read.request = self._agent.createXferReq(
                nixl.NIXL_READ,
                nixl.nixlXferDList(nixl.DRAM_SEG, local),
                nixl.nixlXferDList(nixl.DRAM_SEG, remote),
                peer,
                b"",
                [self._backend],
            )
            read.state = self._state(self._agent.postXferReq(read.request))
        except self._errors:
            read.state = ReadState.FAILED
        return self._handle

    def poll(self, handle: int) -> ReadState:
        """Ask NIXL, which moves the read on."""
        self._require_open()
        read = self._reads[handle]
        if read.state == ReadState.RUNNING:
            try:
                read.state = self._state(self._agent.getXferStatus(read.request))
            except self._errors:
                read.state = ReadState.FAILED
        return read.state

    def release(self, handle: int) -> None:
        """Let go of a terminal read."""
        self._require_open()
        if self._reads[handle].state == ReadState.RUNNING:
            raise Conservation("reads", f"{handle} is released while it runs")
        self._drop(self._reads.pop(handle))

    def progress(self) -> None:
        """Serve reads of peers: UCX answers them on this thread alone."""
        self._require_open()
        self._agent.getNotifs({}, [self._backend])

    def close(self) -> None:
        """Let go of terminal reads, peers and registrations, but not of what still runs."""
        if self._closed:
            return
        self._closed = True
        running = False
        for read in self._reads.values():
            if read.state == ReadState.RUNNING:
                running = True
            else:
                self._drop(read)
        if running:
            return
        self._reads.clear()
        for peer in self._peers:
            self._agent.invalidateRemoteMD(peer)
        for descriptors in self._registered:
            self._agent.deregisterMem(descriptors, [self._backend])

    def _drop(self, read: _Read) -> None:
        if read.request:
            with suppress(*self._errors):
                self._agent.releaseXferReq(read.request)

    def _state(self, status: Any) -> ReadState:
        if status == self._nixl.NIXL_IN_PROG:
            return ReadState.RUNNING
        return ReadState.DONE if status == self._nixl.NIXL_SUCCESS else ReadState.FAILED

    def _require_open(self) -> None:
        if self._closed:
            raise Closed(f"transport {self.name}")
