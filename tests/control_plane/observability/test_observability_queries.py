"""The check that every query returns data: how queries are found, cut and judged."""

from __future__ import annotations

import json
import re

import pytest

from e2e.observability.__main__ import asks, verdict
from e2e.observability.queries import Ask, of_dashboard, sides


@pytest.mark.parametrize(
    ("expr", "parts"),
    [
        ("a / b > 0.9", ["a / b"]),
        ("max (a) / (max (b) > 0) > 0.9", ["max (a) / (max (b) > 0)"]),
        ("absent(a{b=\"c > d\"})", ['a{b="c > d"}']),
        ("sum (a) > 0 and on (pod) rate(b[5m]) == 0", ["sum (a)", "rate(b[5m])"]),
        ("a < 0.5 * a offset 45m and on () time() - c < 1800",
         ["a", "0.5 * a offset 45m", "time() - c"]),
        ("(sum (a) or vector(0)) < 1", ["sum (a)"]),
        ("a == 1", ["a"]),
    ],
)  # fmt: skip
def test_rules_are_cut_at_their_comparisons(expr: str, parts: list[str]) -> None:
    assert sides(expr) == parts


def test_panels_in_rows_are_found_and_variables_filled_in() -> None:
    inner = {"title": "In", "targets": [{"expr": 'a{n=~"$namespace"}[$__rate_interval]'}]}
    text = json.dumps({"panels": [{"title": "Row", "panels": [inner]}]})
    [ask] = of_dashboard("d.json", text, {"__rate_interval": "1m", "namespace": "x"})
    assert ask == Ask("d.json: In", 'a{n=~"x"}[1m]')


def test_everything_of_this_tree_can_be_asked() -> None:
    found = asks("models", "qwen", "1m")
    assert len({ask.where for ask in found}) > 150
    assert not any(re.search(r"@|\$[a-zA-Z_{]", ask.expr) for ask in found)


def test_silence_is_wrong_and_so_is_an_exception_that_is_none() -> None:
    found = [(Ask("a: x", "x"), 0), (Ask("a: y", "y"), 3), (Ask("a: z", "z"), 0)]
    assert verdict(found, ["a: z", "a: y"]) == [
        "returns nothing: a: x\n    x",
        "is excused and returns data: a: y",
    ]
