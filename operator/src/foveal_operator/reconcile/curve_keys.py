"""Makes the CURVE key pairs of one resource, without libzmq in the operator's image.

Called by the reconciler once per resource, before the create-only Secret. Randomness comes in as a
function; the arithmetic is X25519's base-point multiplication (RFC 7748), used once per key and
never on a peer's data, so its timing tells nobody anything. Tests hold it against libzmq.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from foveal_operator.manifests.secret import CurveKeyPairs

_PRIME = 2**255 - 19
_D = -121665 * pow(121666, -1, _PRIME) % _PRIME
_Point = tuple[int, int, int, int]
_ZERO: _Point = (0, 1, 1, 0)
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
    """The X25519 public key of 32 secret bytes: the base point so many times.

    Added up from a table on the birationally equivalent Edwards curve (RFC 8032), four bits of the
    scalar at a time: a quarter of the work of RFC 7748's ladder, of which a resource needs two.
    """
    assert len(secret) == KEY_BYTES
    scalar = int.from_bytes(secret, "little")
    scalar = (scalar & ~7 & ((1 << 255) - 1)) | (1 << 254)
    x, y, z, t = _ZERO
    for row in _table():
        digit, scalar = scalar & 15, scalar >> 4
        if digit:
            less, more, twice = row[digit - 1]
            a, b, c = (y - x) * less % _PRIME, (y + x) * more % _PRIME, t * twice % _PRIME
            e, f, g, h = b - a, 2 * z - c, 2 * z + c, b + a
            x, y, z, t = e * f % _PRIME, g * h % _PRIME, f * g % _PRIME, e * h % _PRIME
    return ((z + y) * pow(z - y, -1, _PRIME) % _PRIME).to_bytes(KEY_BYTES, "little")


def _add(p: _Point, q: _Point) -> _Point:
    """Points in extended coordinates (x/z, y/z, with t = xy/z)."""
    a, b = (p[1] - p[0]) * (q[1] - q[0]) % _PRIME, (p[1] + p[0]) * (q[1] + q[0]) % _PRIME
    c, d = 2 * p[3] * q[3] * _D % _PRIME, 2 * p[2] * q[2] % _PRIME
    e, f, g, h = b - a, d - c, d + c, b + a
    return e * f % _PRIME, g * h % _PRIME, f * g % _PRIME, e * h % _PRIME


@functools.cache
def _table() -> tuple[tuple[tuple[int, int, int], ...], ...]:
    """For each hexadecimal digit of a scalar, 1 to 15 times the base point times 16 to the digit's
    place, as (y - x, y + x, 2 d x y). Of the base point's two x either will do: only y is used."""
    y = 4 * pow(5, -1, _PRIME) % _PRIME
    square = (y * y - 1) * pow(_D * y * y + 1, -1, _PRIME) % _PRIME
    x = pow(square, (_PRIME + 3) // 8, _PRIME)
    if x * x % _PRIME != square:
        x = x * pow(2, (_PRIME - 1) // 4, _PRIME) % _PRIME
    point: _Point = (x, y, 1, x * y % _PRIME)
    rows = []
    for _ in range(2 * KEY_BYTES):
        multiples = [point]
        while len(multiples) < 15:
            multiples.append(_add(multiples[-1], point))
        rows.append(tuple(_flattened(multiple) for multiple in multiples))
        point = _add(multiples[-1], point)
    return tuple(rows)


def _flattened(point: _Point) -> tuple[int, int, int]:
    inverse = pow(point[2], -1, _PRIME)
    x, y = point[0] * inverse % _PRIME, point[1] * inverse % _PRIME
    return (y - x) % _PRIME, (y + x) % _PRIME, 2 * _D * x * y % _PRIME
