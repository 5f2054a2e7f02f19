"""Snapshots of a `mirror_world.World` for the exhaustive checker: fast copies and fingerprints.

Generic over the classes named below; a new mutable class in the mirror must be added to `_MUTABLE`
(`test_checker` proves that copies are independent).
"""

from __future__ import annotations

from collections import OrderedDict, deque

from mirror_world import Task, World

from foveal_runtime.mirror.admission import Pending, RequestAdmission, SessionRequest, State
from foveal_runtime.mirror.receiver import Receiver
from foveal_runtime.mirror.refusals import RefusalBook
from foveal_runtime.mirror.sender import Sender
from foveal_runtime.mirror.session import Session
from foveal_runtime.mirror.store import Bindings, Entry, Store

_MUTABLE = (
    World, Receiver, Sender, Session, RequestAdmission, SessionRequest, Pending, Store, Entry,
    Bindings, RefusalBook, Task,
)  # fmt: skip
_SKIPPED = frozenset(
    {
        "stats", "limits", "sizes", "departed", "boot", "links", "receiver_type",
        "sender_type", "codec", "namespace", "info", "node", "frontend_id", "num_rescued",
        "num_borrowed",
        "num_evicted_limbo", "num_evicted_forced", "num_hits", "body",
    }
)  # fmt: skip
_PLAIN = frozenset({bytes, int, str, bool, type(None), State})
_CONTAINERS = frozenset({dict, OrderedDict, list, deque})
_names: dict[type, tuple[str, ...]] = {}
_tokens: dict[int, tuple[object, int]] = {}
_by_text: dict[str, int] = {}


def _attributes(thing: object) -> tuple[str, ...]:
    kind = type(thing)
    if kind not in _names:
        slots = [getattr(base, "__slots__", ()) for base in kind.__mro__]
        names = [name for group in slots for name in group] or list(vars(thing))
        _names[kind] = tuple(names)
    return _names[kind]


def clone(thing, memo: dict[int, object]):  # type: ignore[no-untyped-def]
    """A copy of the mutable parts; messages, tuples, values are shared: they never change."""
    kind = type(thing)
    if kind in _PLAIN:
        return thing
    if kind is dict or kind is OrderedDict:
        made = thing.copy()
        for key, value in thing.items():
            if type(value) not in _PLAIN:
                made[key] = clone(value, memo)
        memo[id(thing)] = made
        return made
    if kind is list or kind is deque:
        return kind([clone(value, memo) for value in thing]) if thing else kind()
    if kind is set:
        return set(thing)
    if not isinstance(thing, _MUTABLE):
        return thing
    known = memo.get(id(thing))
    if known is not None:
        return known
    made = memo[id(thing)] = kind.__new__(kind)
    for name in _attributes(thing):
        value = getattr(thing, name)
        if type(value) in _PLAIN or name in _SKIPPED:
            setattr(made, name, value)
        elif type(value) is dict and id(value) in memo:  # the table of sessions has two owners
            setattr(made, name, memo[id(value)])
        else:
            setattr(made, name, clone(value, memo))
    return made


def _token(thing: object) -> int:
    """A number for an immutable thing: equal things, equal numbers."""
    known = _tokens.get(id(thing))
    if known is None:
        number = _by_text.setdefault(repr(thing), len(_by_text))
        known = _tokens[id(thing)] = (thing, number)  # kept alive: its id stays its own
    return known[1]


def _freeze(thing, seen: dict[int, int]):  # type: ignore[no-untyped-def]
    kind = type(thing)
    if kind in _PLAIN or kind is tuple:
        return thing
    if not thing and kind in _CONTAINERS:
        return ()
    if kind is dict or kind is OrderedDict:
        return tuple(
            [
                (key, value if type(value) in _PLAIN else _freeze(value, seen))
                for key, value in thing.items()
            ]
        )
    if kind is list or kind is deque:
        return tuple([_freeze(value, seen) for value in thing])
    if kind is set:
        return frozenset(thing)
    if not isinstance(thing, _MUTABLE):
        return _token(thing)
    if id(thing) in seen:
        return seen[id(thing)]
    seen[id(thing)] = len(seen)
    return tuple(
        [_freeze(getattr(thing, name), seen) for name in _attributes(thing) if name not in _SKIPPED]
    )


Snapshot = tuple[World, dict[str, int]]


def copy(state: Snapshot) -> Snapshot:
    return clone(state[0], {}), dict(state[1])


def fingerprint(state: Snapshot) -> int:
    """64 bits of the state: a collision hides a state with odds of about 1e-8 at 1e5 states."""
    return hash((_freeze(state[0], {}), tuple(state[1].items())))
