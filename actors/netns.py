"""A network of this process's own, so that a demo's or a test's cluster listens on nobody's
address.

Ray listens on the host's outward address even when it is told 127.0.0.1 (it rewrites it). In a
fresh network namespace there is only loopback, so all of a local cluster stays inside it.
"""

import ctypes
import fcntl
import os
import socket
import struct
import sys
from enum import Enum
from pathlib import Path

_CLONE_NEWUSER = 0x10000000
_CLONE_NEWNET = 0x40000000
_SIOCSIFFLAGS = 0x8914
_IFF_UP_RUNNING = 0x1 | 0x40
_IFREQ_BYTES = 40


class Isolation(Enum):
    """What came of the attempt."""

    PRIVATE = "private"
    """The process and its children see only a loopback interface of their own."""
    HOST = "host"
    """The system forbids it; the process stays on the host's network."""


def isolate_network() -> Isolation:
    """Move this thread, and all processes it will start, into a network namespace of its own.

    Needs root, or a system that lets users make user namespaces. Call it early, before threads or
    sockets exist. Changes nothing if it is not allowed.
    """
    if sys.platform != "linux":
        return Isolation.HOST
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET) != 0:
        uid, gid = os.getuid(), os.getgid()
        if libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET) != 0:
            return Isolation.HOST
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    _raise_loopback()
    return Isolation.PRIVATE


def _raise_loopback() -> None:
    request = struct.pack("16sh", b"lo", _IFF_UP_RUNNING).ljust(_IFREQ_BYTES, b"\0")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, _SIOCSIFFLAGS, request)
