"""PromQL's expressions as a tree: the part of the language that observability/promql.py writes.

Selectors with =, !=, =~ and !~; rate, increase, deriv, histogram_quantile, vector, time; sum, max,
min, avg and count with `by`; + - * / and comparisons, `or`, `and on`; label_replace with "$1".
Anything else is an error: a panel may not quietly show something other than what it says. Pure;
used by evaluate.py.
"""

from __future__ import annotations

import re
from typing import Literal, cast, get_args

import msgspec

Aggregation = Literal["sum", "max", "min", "avg", "count"]
RangeFunction = Literal["rate", "increase", "deriv"]
_COMPARED = (">", "<", ">=", "<=", "==", "!=")
_LEVELS: tuple[tuple[str, ...], ...] = (("or",), ("and",), _COMPARED, ("+", "-"), ("*", "/"))
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_TOKEN = re.compile(
    r"\s*(?:(?P<number>\d+\.?\d*(?:e[+-]?\d+)?(?![\w]))|(?P<duration>(?:\d+(?:ms|[smhd]))+)"
    r"|(?P<name>[a-zA-Z_:][\w:]*)|(?P<text>\"(?:[^\"\\]|\\.)*\")"
    r"|(?P<sign>=~|!~|!=|>=|<=|==|[-+*/=<>(){}\[\],]))"
)


class ExpressionError(ValueError):
    """Not in the part of PromQL that is known here."""


class Number(msgspec.Struct, frozen=True):
    value: float


class Time(msgspec.Struct, frozen=True):
    """The time that an answer is for."""


class Matcher(msgspec.Struct, frozen=True):
    label: str
    sign: str
    value: str

    def accepts(self, found: str) -> bool:
        if self.sign in ("=", "!="):
            return (found == self.value) == (self.sign == "=")
        return bool(re.fullmatch(self.value, found)) == (self.sign == "=~")


class Selector(msgspec.Struct, frozen=True):
    """`window_seconds` = 0: the value at one time."""

    name: str
    matchers: tuple[Matcher, ...]
    window_seconds: float = 0.0


class Ranged(msgspec.Struct, frozen=True):
    function: RangeFunction
    of: Selector


class Quantile(msgspec.Struct, frozen=True):
    q: float
    of: Tree


class Vector(msgspec.Struct, frozen=True):
    """vector(x): one series without labels."""

    of: Tree


class Relabel(msgspec.Struct, frozen=True):
    """label_replace(of, label, "$1", source, pattern)."""

    of: Tree
    label: str
    source: str
    pattern: str


class Aggregate(msgspec.Struct, frozen=True):
    how: Aggregation
    by: tuple[str, ...]
    of: Tree


class Binary(msgspec.Struct, frozen=True):
    """`on`: the labels by which `and` compares."""

    sign: str
    left: Tree
    right: Tree
    on: tuple[str, ...] = ()


Tree = Number | Time | Selector | Ranged | Quantile | Vector | Relabel | Aggregate | Binary


def parse_expression(text: str) -> Tree:
    """Raises ExpressionError."""
    reader = _Reader(text)
    tree = reader.binary(0)
    if reader.kind != "end":
        raise reader.wrong("the end")
    return tree


def parse_duration(text: str) -> float:
    """90s, 5m, 1h30m in seconds. Raises ExpressionError."""
    if not re.fullmatch(r"(?:\d+(?:ms|[smhd]))+", text):
        raise ExpressionError(f"{text!r} is no duration such as 30s, 5m or 1h30m")
    parts = re.findall(r"(\d+)(ms|[smhd])", text)
    return sum(int(number) * _SECONDS[unit] for number, unit in parts)


def _unquoted(word: str) -> str:
    return word[1:-1].replace('\\"', '"').replace("\\\\", "\\")


class _Reader:
    """Recursive descent; `kind` and `word` are the token ahead."""

    def __init__(self, text: str) -> None:
        self._text = text.rstrip()
        self._at = 0
        self.kind = self.word = ""
        self._next()

    def wrong(self, wanted: str) -> ExpressionError:
        return ExpressionError(f"{wanted} expected before {self._text[self._at :]!r} "
                               f"(at {self.word!r}) in {self._text!r}")  # fmt: skip

    def _next(self) -> str:
        word = self.word
        if self._at >= len(self._text):
            self.kind, self.word = "end", ""
            return word
        found = _TOKEN.match(self._text, self._at)
        if found is None:
            raise self.wrong("something known")
        self._at = found.end()
        self.kind = found.lastgroup or ""
        self.word = found[self.kind]
        return word

    def _take(self, word: str) -> None:
        if self.word != word:
            raise self.wrong(repr(word))
        self._next()

    def binary(self, level: int) -> Tree:
        if level == len(_LEVELS):
            return self._unit()
        left = self.binary(level + 1)
        while self.word in _LEVELS[level] and self.kind in ("sign", "name"):
            sign = self._next()
            if sign == "and" and self.word != "on":
                raise self.wrong("'on'")
            on = self._by() if sign == "and" else ()
            left = Binary(sign, left, self.binary(level + 1), on)
        return left

    def _unit(self) -> Tree:
        if self.word == "(":
            self._next()
            inner = self.binary(0)
            self._take(")")
            return inner
        if self.word == "-":
            self._next()
            return Binary("*", Number(-1.0), self._unit())
        if self.kind == "number":
            return Number(float(self._next()))
        if self.kind == "name":
            return self._named(self._next())
        raise self.wrong("a value")

    def _named(self, name: str) -> Tree:
        if name in get_args(Aggregation) and (self.word in ("by", "(")):
            by = self._by() if self.word == "by" else ()
            inner = self._unit()
            return Aggregate(cast(Aggregation, name), by, inner)
        if self.word != "(":
            return self._selector(name)
        self._next()
        found: Tree
        if name == "time":
            found = Time()
        elif name in get_args(RangeFunction):
            inner = self.binary(0)
            if not isinstance(inner, Selector) or not inner.window_seconds:
                raise self.wrong("a selector with a window")
            found = Ranged(cast(RangeFunction, name), inner)
        elif name == "histogram_quantile":
            q = float(self._next())
            self._take(",")
            found = Quantile(q, self.binary(0))
        elif name == "vector":
            found = Vector(self.binary(0))
        elif name == "label_replace":
            of = self.binary(0)
            label, replacement, source, pattern = (self._text_after_comma() for _ in range(4))
            if replacement != "$1":
                raise self.wrong('"$1" as replacement')
            found = Relabel(of, label, source, pattern)
        else:
            raise ExpressionError(f"{name}() in {self._text!r} is not known here")
        self._take(")")
        return found

    def _text_after_comma(self) -> str:
        self._take(",")
        if self.kind != "text":
            raise self.wrong("a quoted text")
        return _unquoted(self._next())

    def _by(self) -> tuple[str, ...]:
        self._next()
        self._take("(")
        names = []
        while self.word != ")":
            if self.kind != "name":
                raise self.wrong("a label")
            names.append(self._next())
            if self.word == ",":
                self._next()
        self._next()
        return tuple(names)

    def _selector(self, name: str) -> Selector:
        matchers = []
        if self.word == "{":
            self._next()
            while self.word != "}":
                label, sign = self._next(), self._next()
                if sign not in ("=", "!=", "=~", "!~") or self.kind != "text":
                    raise self.wrong("a label, a sign and a quoted value")
                matchers.append(Matcher(label, sign, _unquoted(self._next())))
                if self.word == ",":
                    self._next()
            self._next()
        if self.word != "[":
            return Selector(name, tuple(matchers))
        self._next()
        window = parse_duration(self._next())
        self._take("]")
        return Selector(name, tuple(matchers), window)
