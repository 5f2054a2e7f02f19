"""The CURVE keys of one resource, as ZeroMQ's base-85 text, and the Secret that holds them.

Made once per resource, for its create-only Secret, and once per `foveal up`. The arithmetic is
libsodium's (by way of PyNaCl), as it is in libzmq, which the operator's image does not hold.
"""

from __future__ import annotations

from collections.abc import Callable

from nacl.public import PrivateKey

from foveal_operator.kube.types import Obj
from foveal_operator.manifests.context import Context

_Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"


def curve_secret(context: Context, keys: dict[str, str] | None = None) -> Obj:
    """Without keys: the object as `foveal plan` lists it, with no data in it. Never read back."""
    body = context.object("v1", "Secret", "curve", "engine", type="Opaque", immutable=True)
    return {**body, "stringData": keys} if keys else body


def make_keys(random_bytes: Callable[[int], bytes]) -> dict[str, str]:
    """Two new key pairs, of the engines and of the frontends, by file name; 40 characters each.
    `random_bytes` must be cryptographic (secrets.token_bytes)."""
    found = {}
    for role in ("server", "client"):
        secret = PrivateKey(random_bytes(PrivateKey.SIZE))
        found[f"{role}-public"] = z85(secret.public_key.encode())
        found[f"{role}-secret"] = z85(secret.encode())
    return found


def z85(data: bytes) -> str:
    """ZeroMQ's base-85 text (RFC 32): five characters for four bytes."""
    assert len(data) % 4 == 0
    text = []
    for start in range(0, len(data), 4):
        value = int.from_bytes(data[start : start + 4], "big")
        text += [_Z85[value // 85**power % 85] for power in (4, 3, 2, 1, 0)]
    return "".join(text)
