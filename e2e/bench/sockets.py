"""Bytes on a server's internal sockets, as the kernel counts them (`ss`): counting costs the server
nothing."""

from __future__ import annotations

import re
import shutil
import subprocess
from typing import NamedTuple

import psutil

from e2e.bench.processes import role_of, tree

_BYTES = re.compile(r"bytes_(?:sent|received):(\d+)")
_SOCKET = re.compile(r"\S+:(\d+)\s+\S+:(\d+)")
_PID = re.compile(r"pid=(\d+)")


class Sockets(NamedTuple):
    """Bytes so far, both directions, by (port here, port there), of connections to engines."""

    num_bytes: dict[tuple[int, int], int]


def engine_sockets(pid: int) -> Sockets | None:
    """Of the TCP connections from frontends to engines below process `pid`; None: not known."""
    if not shutil.which("ss"):
        return None
    frontends, ports = set(), set()
    for process in tree(pid):
        role = role_of(process.cmdline())
        if role == "frontend":
            frontends.add(process.pid)
        elif role == "engine":
            listening = process.net_connections("tcp")
            ports |= {c.laddr.port for c in listening if c.status == psutil.CONN_LISTEN}
    command = ["ss", "-tinHOp", "state", "established"]
    text = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout
    return Sockets(read_sockets(text, frontends, ports))


def read_sockets(text: str, pids: set[int], ports: set[int]) -> dict[tuple[int, int], int]:
    """The lines of `ss -tinHOp` of processes `pids` that are connected to one of `ports`."""
    found = {}
    for line in text.splitlines():
        socket = _SOCKET.search(line)
        owners = {int(pid) for pid in _PID.findall(line)}
        if socket and owners & pids and int(socket[2]) in ports:
            key = (int(socket[1]), int(socket[2]))
            found[key] = sum(map(int, _BYTES.findall(line)))
    return found


def bytes_between(before: Sockets | None, after: Sockets | None) -> int | None:
    """Bytes both ways on connections that were there all the time, heartbeats included."""
    if before is None or after is None:
        return None
    old = before.num_bytes
    return sum(num - old[key] for key, num in after.num_bytes.items() if key in old)
