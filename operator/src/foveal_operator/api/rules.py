"""Rules of the resource, each said twice: as CEL for the API server, as Python for `foveal plan`.

Used by spec.py (where rules stand beside the fields they bind), crd.py (which writes the CEL)
and parse.py (which runs the Python). A test holds the two forms against each other.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from foveal_runtime.plan import quantity


class Rule(msgspec.Struct, frozen=True):
    """One rule of one object. `check` gets the parsed struct and says whether it is kept.

    `field` names the field to blame, below the object that carries the rule.
    """

    cel: str
    message: str
    check: Callable[[Any], bool]
    field: str = ""


class Transition(msgspec.Struct, frozen=True):
    """One rule of an update. `check` gets the new and the old struct."""

    cel: str
    message: str
    check: Callable[[Any, Any], bool]
    field: str = ""


class Format(msgspec.Struct, frozen=True):
    """A rule of one string, wherever it stands."""

    cel: str
    message: str
    check: Callable[[str], bool]


LEAST, MOST = "1k", "1P"
"""What sizes lie between: less is a forgotten unit, more is no memory that exists."""
_WITHIN = (
    f"quantity(self).isGreaterThan(quantity('{LEAST}')) && "
    f"quantity(self).isLessThan(quantity('{MOST}'))"
)


def _is_within(text: str) -> bool:
    if not quantity.is_quantity(text):
        return False
    return quantity.parse(LEAST) < quantity.parse(text) < quantity.parse(MOST)


def _is_cpus(text: str) -> bool:
    return quantity.is_quantity(text) and Fraction(99, 100_000) < quantity.parse(text) < 10_000


FORMATS: dict[str, Format] = {
    "autoSize": Format(
        cel=f"self in ['Auto', '0'] || (isQuantity(self) && {_WITHIN})",
        message="must be Auto, 0, or 1Ki to 1P, such as 4Gi",
        check=lambda text: text in ("Auto", "0") or _is_within(text),
    ),
    "quantity": Format(
        cel=f"isQuantity(self) && {_WITHIN}",
        message="must be 1Ki to 1P, such as 16Gi",
        check=_is_within,
    ),
    "cpus": Format(
        cel="isQuantity(self) && quantity(self).isGreaterThan(quantity('990u')) && "
        "quantity(self).isLessThan(quantity('10k'))",
        message="must be 1m to 10k CPUs",
        check=_is_cpus,
    ),
}


def bounded(max_length: int, pattern: str | None = None) -> Meta:
    return Meta(max_length=max_length, min_length=1, pattern=pattern)


def _formatted(name: str) -> Meta:
    return Meta(max_length=24, extra_json_schema={"x-foveal-format": name})


AutoSize = Annotated[str, _formatted("autoSize")]
Quantity = Annotated[str, _formatted("quantity")]
Cpus = Annotated[str, _formatted("cpus")]
ObjectName = Annotated[str, bounded(253, r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")]
LabelName = Annotated[str, bounded(63, r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")]
"""An object's name that is also the value of a label."""
DataKey = Annotated[str, bounded(253, r"^[-._a-zA-Z0-9]+$")]
LabelValue = Annotated[str, Meta(max_length=63, pattern=r"^[-._a-zA-Z0-9]*$")]
Domain = Annotated[str, bounded(253, r"^\.?[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")]
_DNS_LABEL = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
HostName = Annotated[str, bounded(253, rf"^(\*\.)?{_DNS_LABEL}(\.{_DNS_LABEL})*$")]
"""As the Gateway API has them: a wildcard stands for the first labels."""
Text = Annotated[str, bounded(256)]
Url = Annotated[str, bounded(1024, r"^https?://[^\s]+$")]


class Part(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    rename="camel",
    omit_defaults=True,
):
    """Base of every object of the resource: unknown fields are refused by name."""


def size_of(text: str | None) -> int | None:
    """Bytes of a pinned size; None for Auto and for a field that is not set."""
    return None if text is None or text == "Auto" else quantity.parse_bytes(text)


def pinned_sum_below(limit: str | None, *sizes: str | None) -> bool:
    """True unless the pinned sizes together reach the limit. Unparsable sizes are not its matter:
    their own format refuses them."""
    known = [s for s in sizes if s not in (None, "Auto") and quantity.is_quantity(str(s))]
    if limit is None or not quantity.is_quantity(limit) or not known:
        return True
    return sum(quantity.parse(str(s)) for s in known) < quantity.parse(limit)
