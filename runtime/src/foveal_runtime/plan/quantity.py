"""Kubernetes quantities and GiB for people; code in between counts bytes.

Called by the operator's spec (text to bytes), by the manifests (bytes to text) and by everything
that prints sizes. Comparison is by value: "0.5Gi" equals "512Mi".
"""

from __future__ import annotations

import functools
import re
from fractions import Fraction

_NUMBER = re.compile(r"([+-]?[0-9]+(?:\.[0-9]*)?|[+-]?\.[0-9]+)([EeinumkKMGTP]*|[eE][+-]?[0-9]+)")
_SUFFIX: dict[str, Fraction] = {
    "": Fraction(1),
    "n": Fraction(1, 10**9),
    "u": Fraction(1, 10**6),
    "m": Fraction(1, 1000),
    "k": Fraction(10**3),
    "M": Fraction(10**6),
    "G": Fraction(10**9),
    "T": Fraction(10**12),
    "P": Fraction(10**15),
    "E": Fraction(10**18),
    "Ki": Fraction(2**10),
    "Mi": Fraction(2**20),
    "Gi": Fraction(2**30),
    "Ti": Fraction(2**40),
    "Pi": Fraction(2**50),
    "Ei": Fraction(2**60),
}
_EXPONENT = re.compile(r"[eE]([+-]?[0-9]{1,3})")
MAX_LENGTH = 32


@functools.lru_cache(maxsize=1024)
def parse(text: str) -> Fraction:
    """The exact value of a Kubernetes quantity. Raises ValueError with the text and a good form."""
    match = _NUMBER.fullmatch(text) if len(text) <= MAX_LENGTH else None
    if match is None:
        raise ValueError(f"{text[:MAX_LENGTH]!r} is not a quantity (write 512Mi or 4Gi)")
    number, suffix = Fraction(match[1]), match[2]
    if suffix in _SUFFIX:
        return number * _SUFFIX[suffix]
    exponent = _EXPONENT.fullmatch(suffix)
    if exponent is None:
        raise ValueError(f"{text!r} is not a quantity: unknown suffix {suffix!r} (write Mi or Gi)")
    return number * Fraction(10) ** int(exponent[1])


def parse_bytes(text: str) -> int:
    """Bytes of a quantity, rounded up. Raises ValueError, also when it is negative."""
    value = parse(text)
    if value < 0:
        raise ValueError(f"{text!r} is negative; a size is 0 or more")
    return -int(-value // 1)


def parse_millicores(text: str) -> int:
    """Thousandths of a CPU, rounded up. Raises ValueError, also when it is not above 0."""
    value = parse(text) * 1000
    if value <= 0:
        raise ValueError(f"{text!r} is not a positive number of CPUs (write 2 or 500m)")
    return -int(-value // 1)


def is_quantity(text: str) -> bool:
    try:
        parse(text)
    except ValueError:
        return False
    return True


def format_bytes(size_bytes: int) -> str:
    """The canonical quantity: the largest binary suffix that divides it exactly."""
    for suffix, power in (("Gi", 30), ("Mi", 20), ("Ki", 10)):
        if size_bytes and size_bytes % (1 << power) == 0:
            return f"{size_bytes >> power}{suffix}"
    return str(size_bytes)


def mebibytes(size_bytes: int) -> str:
    """The quantity in whole Mi, rounded up."""
    return f"{-(-size_bytes // (1 << 20))}Mi"


def format_millicores(millicores: int) -> str:
    return str(millicores // 1000) if millicores % 1000 == 0 else f"{millicores}m"


def format_gib(size_bytes: int) -> str:
    """GiB for people. Below 0.1 GiB three significant places are kept, so nothing reads as 0."""
    gib = size_bytes / (1 << 30)
    if size_bytes == 0 or abs(gib) >= 0.095:
        return f"{gib:.2f} GiB"
    digits = 4 if abs(gib) >= 0.001 else 6
    return f"{gib:.{digits}f} GiB"


def short_bytes(size_bytes: int) -> str:
    """Three figures at most: 812 KiB, 1.2 MiB, 14 GiB."""
    value, unit = float(size_bytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1000 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" or value >= 10 else f"{value:.1f} {unit}"
