"""Makes the CURVE key pairs of one resource, without libzmq in the operator's image.

Called by the reconciler once per resource, before the create-only Secret. Randomness comes in as a
function; the arithmetic is X25519's base-point multiplication (RFC 7748), used once per key and
never on a peer's data, so its timing tells nobody anything. Tests hold it against libzmq.
"""

from __future__ import annotations

from collections.abc import Callable

from foveal_operator.manifests.secret import CurveKeyPairs

_PRIME = 2**255 - 19
_A24 = 121665
_BASE_POINT = 9
_Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
KEY_BYTES = 32


def make_key_pairs(random_bytes: Callable[[int], bytes]) -> CurveKeyPairs:
    """Two fresh pairs as Z85 text. `random_bytes` must be cryptographic (secrets.token_bytes)."""
    server, client = random_bytes(KEY_BYTES), random_bytes(KEY_BYTES)
    return CurveKeyPairs(
        server_public=z85(public_key(server)),
        server_secret=z85(server),
        client_public=z85(public_key(client)),
        client_secret=z85(client),
    )


def z85(data: bytes) -> str:
    """ZeroMQ's base-85 text: five characters for four bytes."""
    assert len(data) % 4 == 0
    text = []
    for start in range(0, len(data), 4):
        value = int.from_bytes(data[start : start + 4], "big")
        text += [_Z85[value // 85**power % 85] for power in (4, 3, 2, 1, 0)]
    return "".join(text)


def public_key(secret: bytes) -> bytes:
    """The X25519 public key of 32 secret bytes (Montgomery ladder over the base point)."""
    assert len(secret) == KEY_BYTES
    scalar = int.from_bytes(secret, "little")
    scalar = (scalar & ~7 & ((1 << 255) - 1)) | (1 << 254)
    x2, z2, x3, z3, swap = 1, 0, _BASE_POINT, 1, 0
    for bit in reversed(range(255)):
        current = scalar >> bit & 1
        if swap ^ current:
            x2, x3, z2, z3 = x3, x2, z3, z2
        swap = current
        a, b, c, d = x2 + z2, x2 - z2, x3 + z3, x3 - z3
        da, cb = d * a % _PRIME, c * b % _PRIME
        aa, bb = a * a % _PRIME, b * b % _PRIME
        x3, z3 = (da + cb) ** 2 % _PRIME, _BASE_POINT * (da - cb) ** 2 % _PRIME
        e = aa - bb
        x2, z2 = aa * bb % _PRIME, e * (aa + _A24 * e) % _PRIME
    if swap:
        x2, z2 = x3, z3
    return (x2 * pow(z2, _PRIME - 2, _PRIME) % _PRIME).to_bytes(KEY_BYTES, "little")
