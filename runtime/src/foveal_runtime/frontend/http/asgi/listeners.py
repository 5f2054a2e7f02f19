"""Listening sockets of an HTTP process, on TCP and on Unix addresses.

Made by main/ before anything large is imported: a port in use is said at once.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

from foveal_runtime.plan.errors import StartupError

BACKLOG = 2048


def bind_tcp(host: str, port: int, *, share: bool = False, listen: bool = True) -> socket.socket:
    """A listening socket; `share` lets several processes listen on the same port, and without
    `listen` the port is only kept. Raises StartupError naming the address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if share:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        found.bind((host, port))
        if listen:
            found.listen(BACKLOG)
    except OSError as error:
        found.close()
        raise StartupError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    found.setblocking(False)
    return found


def bind_addresses(
    host: str, port: int, *, loopback: bool, share: bool = False, listen: bool = True
) -> list[socket.socket]:
    """As bind_tcp, and with `loopback` on the loopback address of the same family too, where that
    is another one."""
    hosts = [host]
    own = "::1" if ":" in host else "127.0.0.1"
    if loopback and host not in (own, "::", "0.0.0.0", "localhost"):
        hosts.append(own)
    found: list[socket.socket] = []
    try:
        for address in hosts:
            found.append(bind_tcp(address, port, share=share, listen=listen))
    except StartupError:
        for bound in found:
            bound.close()
        raise
    return found


def bind_unix(path: str) -> socket.socket:
    """A listening Unix socket, readable by this user only; a stale file of that name goes."""
    Path(path).unlink(missing_ok=True)
    found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        found.bind(path)
        os.chmod(path, 0o600)
        found.listen(64)
    except OSError as error:
        found.close()
        raise StartupError(f"cannot listen on {path}: {error.strerror}") from error
    found.setblocking(False)
    return found
