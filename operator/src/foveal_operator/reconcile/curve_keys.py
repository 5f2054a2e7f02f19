"""CURVE key pairs of one resource, as ZeroMQ's base-85 text.

Made once per resource, before its create-only Secret, and once per `foveal up`. The arithmetic is
libsodium's (by way of PyNaCl), as it is in libzmq, which the operator's image does not hold.
"""

from __future__ import annotations

from collections.abc import Callable

from nacl.public import PrivateKey

from foveal_operator.manifests.secret import CurveKeyPairs

_Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"


def make_key_pairs(random_bytes: Callable[[int], bytes]) -> CurveKeyPairs:
    """Two new pairs. `random_bytes` must be cryptographic (secrets.token_bytes)."""
    server, client = (PrivateKey(random_bytes(PrivateKey.SIZE)) for _ in range(2))
    return CurveKeyPairs(
        server_public=z85(server.public_key.encode()),
        server_secret=z85(server.encode()),
        client_public=z85(client.public_key.encode()),
        client_secret=z85(client.encode()),
    )


def z85(data: bytes) -> str:
    """ZeroMQ's base-85 text (RFC 32): five characters for four bytes."""
    assert len(data) % 4 == 0
    text = []
    for start in range(0, len(data), 4):
        value = int.from_bytes(data[start : start + 4], "big")
        text += [_Z85[value // 85**power % 85] for power in (4, 3, 2, 1, 0)]
    return "".join(text)
