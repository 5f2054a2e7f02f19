"""CURVE keys of the links: reading the files that `plan.config.CurveKeys` names, and who gets in.

A key file holds Z85 text of 40 characters; an engine's `client_public_file` is its allow-list, one
client key a line. Keys are never logged.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import zmq
from zmq.auth.thread import ThreadAuthenticator

from foveal_runtime.plan.config import CurveKeys
from foveal_runtime.plan.errors import StartupError

KEY_CHARS = 40


def is_enabled(keys: CurveKeys) -> bool:
    return keys != CurveKeys()


class _AllowList:
    """Which client keys may connect, as pyzmq's authenticator asks it."""

    def __init__(self, keys: list[bytes]) -> None:
        self._keys = frozenset(keys)

    def callback(self, domain: str, key: bytes) -> bool:
        return key in self._keys


def guard(
    context: zmq.Context[zmq.Socket[bytes]], sockets: Sequence[zmq.Socket[bytes]], keys: CurveKeys
) -> ThreadAuthenticator:
    """Lets clients in by their keys alone. Before the sockets are bound; stop what is returned
    before the context is terminated. Raises StartupError as `read_key`."""
    allowed = read_keys(keys.client_public_file, "client_public_file")
    secret = read_key(keys.server_secret_file, "server_secret_file")
    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback("*", _AllowList(allowed))
    for socket in sockets:
        socket.curve_secretkey = secret
        socket.curve_server = True
    return authenticator


def read_key(path: str, field: str) -> bytes:
    """One Z85 key. Raises StartupError naming the field and the file."""
    keys = read_keys(path, field)
    if len(keys) != 1:
        raise StartupError(f"curve.{field}: {path} holds {len(keys)} keys, exactly one is needed")
    return keys[0]


def read_keys(path: str, field: str) -> list[bytes]:
    """Every Z85 key of a file, one a line. Raises StartupError naming the field and the file."""
    if not path:
        raise StartupError(f"curve.{field} is not set: with CURVE every key file is needed")
    try:
        lines = Path(path).read_bytes().split()
    except OSError as error:
        raise StartupError(f"curve.{field}: cannot read {path}: {error.strerror}") from error
    for line in lines:
        if len(line) != KEY_CHARS:
            raise StartupError(f"curve.{field}: {path} holds no Z85 key of {KEY_CHARS} characters")
    return lines
