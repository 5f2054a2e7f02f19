"""CURVE keys of the links: reading the files that `plan.config.CurveKeys` names, making new ones.

A key file holds Z85 text of 40 characters; an engine's `client_public_file` is its allow-list, one
client key a line. Used by `zmq_transport` and by whoever writes key files. Keys are never logged.
"""

from __future__ import annotations

import os
from pathlib import Path

import zmq

from foveal_runtime.plan.config import CurveKeys
from foveal_runtime.plan.errors import StartupError

KEY_CHARS = 40


def is_enabled(keys: CurveKeys) -> bool:
    return any(
        (
            keys.server_public_file,
            keys.server_secret_file,
            keys.client_public_file,
            keys.client_secret_file,
        )
    )


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


def write_key_pairs(directory: Path) -> CurveKeys:
    """Makes a server and a client key pair (files readable by their owner alone)."""
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    paths = {}
    for role in ("server", "client"):
        public, secret = zmq.curve_keypair()
        for kind, key in (("public", public), ("secret", secret)):
            path = directory / f"{role}.{kind}"
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(handle, "wb") as file:
                file.write(key + b"\n")
            paths[f"{role}_{kind}_file"] = str(path)
    return CurveKeys(**paths)
