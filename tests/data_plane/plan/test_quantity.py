"""Quantities: the API server's forms, compared by value, printed the way people read them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foveal_runtime.plan.quantity import (
    format_bytes,
    format_gib,
    is_quantity,
    parse,
    parse_bytes,
    parse_millicores,
)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("1", 1),
        ("4Gi", 4 << 30),
        ("0.5Gi", 512 << 20),
        ("1e3", 1000),
        ("1k", 1000),
        ("1.5Ki", 1536),
        ("100m", 1),
        (".5Mi", 1 << 19),
        ("2E", 2 * 10**18),
        ("1E2", 100),
    ],
)
def test_bytes_of_every_form(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "Gi", "1 Gi", "4GiB", "4gb", "1e", "--1", "0x10", "1" * 40])
def test_what_is_no_quantity_is_refused_by_name(text: str) -> None:
    assert not is_quantity(text)
    with pytest.raises(ValueError, match="is not a quantity"):
        parse(text)


def test_negative_sizes_and_zero_cpus_are_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        parse_bytes("-1Gi")
    with pytest.raises(ValueError, match="positive"):
        parse_millicores("0")
    assert parse_millicores("1500m") == parse_millicores("1.5") == 1500


@given(st.integers(0, 1 << 60))
def test_printing_loses_nothing(size: int) -> None:
    assert parse_bytes(format_bytes(size)) == size


def test_small_sizes_do_not_read_as_nothing() -> None:
    assert format_gib(0) == "0.00 GiB"
    assert format_gib(64 << 20) == "0.0625 GiB"
    assert format_gib(9 << 29) == "4.50 GiB"
