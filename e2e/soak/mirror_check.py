"""Exhaustive search over the mirror's own state machines in small instances.

Every order of every message, flush, admission, finish and fault is tried, breadth first, over
snapshots of the running code (no second model). Checked in each state: the guarantees that
`World.check` sees. Checked at the end: every state can still reach one where all is settled (I3),
and a state without moves is settled, converged and leaks nothing.

    python e2e/soak/mirror_check.py               # every instance, to the end (hours, 20 GiB)
    python e2e/soak/mirror_check.py --seconds 60  # every instance, as far as that goes
    python e2e/soak/mirror_check.py evict-2x1     # one of them
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque
from dataclasses import dataclass
from itertools import product

from mirror_snapshot import copy, fingerprint
from mirror_world import Link, Task, Violation, World

from foveal_runtime.mirror.receiver import Receiver, ReceiverLimits
from foveal_runtime.mirror.sender import Sender
from foveal_runtime.plan.errors import MediaTooLarge


@dataclass(frozen=True)
class Instance:
    """What is explored. `tasks` are (frontend, items, engine or -1); budgets count faults;
    `refusals` are (frontend, key or 0 to clear, time), noted in that order at any moment.

    Attributes:
        silent: a crash of an engine breaks no connection, as when a proxy or ZMQ reconnects.
        evict: the engine may evict any unpinned value at any moment (covers every policy).
    """

    frontends: int = 2
    engines: int = 1
    sizes: tuple[int, ...] = (1, 1)
    tasks: tuple[tuple[int, tuple[int, ...], int], ...] = ((0, (0,), 0), (1, (0,), 0))
    capacity: int = 1
    window: int = 1
    grace: int = 0
    staging: int = 16
    largest: int = 4
    aborts: int = 0
    breaks: int = 0
    engine_crashes: int = 0
    frontend_crashes: int = 0
    resets: int = 0
    shrinks: int = 0
    refusals: tuple[tuple[int, int, float], ...] = ()
    silent: bool = False
    evict: bool = False

    def world(self, receiver_type: type[Receiver], sender_type: type[Sender]) -> World:
        limits = ReceiverLimits(
            capacity_bytes=self.capacity,
            staging_bytes=self.staging,
            largest_request_bytes=self.largest,
            grace_bytes=self.grace,
            max_cacheable_bytes=1 << 30,
            max_window_bytes=self.window,
            window_divisor=1,
        )
        world = World(
            self.frontends,
            self.engines,
            list(self.sizes),
            limits,
            receiver_type=receiver_type,
            sender_type=sender_type,
        )
        world.settle()  # every session is open
        for frontend, items, _ in self.tasks:
            world.add_task(frontend, items)
        return world


INSTANCES: dict[str, Instance] = {
    "plain-2x1": Instance(tasks=((0, (0,), 0), (1, (1,), 0))),
    "same-2x1": Instance(capacity=2),
    "evict-2x1": Instance(tasks=((0, (0,), 0), (1, (1,), 0)), evict=True),
    "two-items-2x1": Instance(
        tasks=((0, (0, 1), 0), (1, (1, 0), 0)), capacity=2, window=2
    ),
    "repeat-1x1": Instance(
        frontends=1, tasks=((0, (0,), 0), (0, (1,), 0), (0, (0,), 0)), window=2
    ),
    "repeat-limbo-1x1": Instance(
        frontends=1, tasks=((0, (0,), 0), (0, (1,), 0), (0, (0,), 0)), window=2, grace=1,
        capacity=2,
    ),
    "abort-2x1": Instance(tasks=((0, (0,), 0), (1, (1,), 0)), aborts=1),
    "break-2x1": Instance(tasks=((0, (0,), 0), (1, (0,), 0)), breaks=1),
    "engine-crash-2x1": Instance(engine_crashes=1),
    "frontend-crash-2x1": Instance(frontend_crashes=1, window=0),
    "pull-2x1": Instance(window=0, aborts=1),
    "pull-meets-copy-2x1": Instance(
        tasks=((0, (0, 1), 0), (1, (0,), 0)), capacity=2, window=1, aborts=1
    ),
    "reset-2x1": Instance(resets=1, aborts=1),
    "bypass-2x1": Instance(
        sizes=(2, 1), tasks=((0, (0,), 0), (1, (0, 1), 0), (1, (1,), 0)), capacity=1, staging=4,
        largest=3, window=2,
    ),
    "borrow-2x1": Instance(
        sizes=(2, 1), tasks=((0, (0, 1), 0), (1, (0,), 0), (1, (1,), 0)), capacity=2, staging=2,
        largest=3,
    ),
    "zero-2x1": Instance(capacity=0, staging=2, largest=1),
    "shrink-1x1": Instance(
        frontends=1, tasks=((0, (0,), 0), (0, (1,), 0)), capacity=2, shrinks=1, staging=2, largest=2
    ),
    "silent-crash-1x1": Instance(
        frontends=1, tasks=((0, (0,), 0),), engine_crashes=1, silent=True
    ),
    "evict-repeat-1x1": Instance(
        frontends=1, tasks=((0, (0,), 0), (0, (0,), 0), (0, (1,), 0)), evict=True
    ),
    "disjoint-2x1": Instance(
        sizes=(1, 1, 1, 1), tasks=((0, (0, 1), 0), (1, (2, 3), 0)), capacity=2, window=2
    ),
    "break-1x1": Instance(frontends=1, tasks=((0, (0,), 0), (0, (1,), 0)), breaks=1),
    "crash-1x1": Instance(
        frontends=1, tasks=((0, (0,), 0), (0, (0,), 0)), engine_crashes=1, frontend_crashes=1
    ),
    "abort-reset-1x1": Instance(
        frontends=1, tasks=((0, (0,), 0), (0, (0,), 0)), aborts=1, resets=1
    ),
    "pull-abort-1x1": Instance(
        frontends=1, tasks=((0, (0,), 0), (0, (0, 1), 0)), capacity=2, window=0, aborts=1
    ),
    "failover-1x2": Instance(
        frontends=1, engines=2, tasks=((0, (0,), -1), (0, (0,), -1)), engine_crashes=1
    ),
    "refusal-2x1": Instance(
        tasks=((0, (0,), 0),), engine_crashes=1, frontend_crashes=1,
        refusals=((0, 1, 1.0), (1, 0, 2.0), (0, 2, 3.0)),
    ),
}  # fmt: skip


Move = tuple


class Search:
    """Breadth-first search of one instance."""

    def __init__(
        self,
        instance: Instance,
        *,
        receiver_type: type[Receiver] = Receiver,
        sender_type: type[Sender] = Sender,
    ) -> None:
        self.instance = instance
        self.world = instance.world(receiver_type, sender_type)
        self.start = {
            "abort": instance.aborts,
            "break": instance.breaks,
            "crash_engine": instance.engine_crashes,
            "crash_frontend": instance.frontend_crashes,
            "reset": instance.resets,
            "shrink": instance.shrinks,
            "refusal": len(instance.refusals),
        }
        self.num_states = 0
        self.is_complete = False

    def run(self, max_states: int = 10**9, max_seconds: float = 1e9) -> None:
        """Raises Violation, with the moves that lead there. `is_complete`: nothing is left to
        explore."""
        end = time.monotonic() + max_seconds
        first = (self.world, dict(self.start))
        seen: dict[int, int] = {fingerprint(first): 0}
        origin: list[tuple[int, Move]] = [(-1, ())]
        before: list[list[int]] = [[]]
        settled: list[int] = []
        frontier = deque([(0, first)])
        while frontier:
            if len(origin) >= max_states or time.monotonic() > end:
                self.num_states = len(origin)
                return
            index, state = frontier.popleft()
            move: Move = ()
            try:
                moves = self._moves(*state)
                if not moves:
                    self._judge_end(state[0])
                    settled.append(index)
                for move in moves:
                    following = copy(state)
                    self._carry_out(*following, move)
                    following[0].check()
                    key = fingerprint(following)
                    known = seen.get(key)
                    if known is None:
                        known = seen[key] = len(origin)
                        origin.append((index, move))
                        before.append([])
                        frontier.append((known, following))
                    before[known].append(index)
            except AssertionError as error:
                path = [*self._path(origin, index), move]
                raise Violation(f"{error} after {path}") from error
        self.num_states = len(origin)
        self.is_complete = True
        self._judge_liveness(before, settled, origin)

    @staticmethod
    def _path(origin: list[tuple[int, Move]], index: int) -> list[Move]:
        path = []
        while index > 0:
            index, move = origin[index]
            path.append(move)
        return path[::-1]

    def _judge_end(self, world: World) -> None:
        if not world.is_settled():
            raise Violation("I3: no move is left and a request is not settled")
        world.check_end()
        for link in world.links:
            if not world.is_quiet(link):
                raise Violation("I6: no move is left and a link is not at rest")

    def _judge_liveness(
        self, before: list[list[int]], settled: list[int], origin: list[tuple[int, Move]]
    ) -> None:
        """Every state reaches a settled one: walks back from those."""
        reached, todo = set(settled), deque(settled)
        while todo:
            for index in before[todo.popleft()]:
                if index not in reached:
                    reached.add(index)
                    todo.append(index)
        stuck = [index for index in range(len(before)) if index not in reached]
        if stuck:
            path = self._path(origin, stuck[0])
            raise Violation(f"I3: {len(stuck)} states never settle, first after {path}")

    # ---- moves ---------------------------------------------------------------------------------
    def _moves(self, world: World, left: dict[str, int]) -> list[Move]:
        moves: list[Move] = []
        for link in world.links:
            if world.broken[link]:
                moves.append(("hello", link))
            if world.up[link]:
                moves.append(("up", link))
            if world.down[link]:
                moves.append(("down", link))
            if world.needs[link]:
                moves.append(("answer", link))
            if world.has_news(link):
                moves.append(("flush", link))
            if world.senders[link].owes_refusals():
                moves.append(("refuse", link))
            if self._wants_heartbeat(world, link):
                moves.append(("heartbeat", link))
        if left["refusal"]:
            moves.append(("refusal", self.instance.refusals[-left["refusal"]]))
        for task in world.tasks.values():
            if task.state == "new" and self._is_first(world, task):
                fixed = self.instance.tasks[task.name][2]
                moves += [
                    ("send", task.name, e)
                    for f, e in world.links
                    if f == task.frontend and fixed in (-1, e) and world.senders[f, e].is_up
                ]
            if task.state == "sent" and left["abort"]:
                moves.append(("abort", task.name))
        for engine in range(self.instance.engines):
            moves += [("finish", engine, key) for key in world.running[engine]]
        if self.instance.evict:
            moves += self._evictions(world)
        return moves + self._faults(world, left)

    def _wants_heartbeat(self, world: World, link: Link) -> bool:
        """Only heartbeats that tell something, so that the search stays finite."""
        sender, session = world.senders[link], world.receivers[link[1]].sessions.get(f"f{link[0]}")
        is_known = session is not None and session.sid == sender.sid
        return (
            self.instance.silent
            and sender.is_up
            and not is_known
            and not (world.up[link] or world.down[link] or world.broken[link])
        )

    @staticmethod
    def _is_first(world: World, task: Task) -> bool:
        """A frontend's new requests go in order: less states, nothing lost."""
        return not any(
            t.state == "new" and t.frontend == task.frontend and t.name < task.name
            for t in world.tasks.values()
        )

    @staticmethod
    def _evictions(world: World) -> list[Move]:
        return [
            ("evict", engine, place, h)
            for engine, receiver in enumerate(world.receivers)
            for place in ("idle", "limbo")
            for h in getattr(receiver.store, place)
        ]

    def _faults(self, world: World, left: dict[str, int]) -> list[Move]:
        moves: list[Move] = []
        if not world.is_settled():
            if left["break"]:
                for link in world.links:
                    if not world.broken[link]:
                        moves += self._breaks(world, link)
            if left["crash_engine"]:
                moves += [("crash_engine", e) for e in range(self.instance.engines)]
            if left["crash_frontend"]:
                moves += [("crash_frontend", f) for f in range(self.instance.frontends)]
            if left["reset"]:
                moves += [("reset", e) for e in range(self.instance.engines)]
            if left["shrink"]:
                moves += [("shrink", e) for e in range(self.instance.engines)]
        return moves

    @staticmethod
    def _breaks(world: World, link: Link) -> list[Move]:
        """Any subset of the messages in flight survives."""
        ups = list(product((False, True), repeat=len(world.up[link])))
        downs = list(product((False, True), repeat=len(world.down[link])))
        return [("break", link, u, d, notice) for u in ups for d in downs for notice in (0, 1)]

    def _carry_out(self, world: World, left: dict[str, int], move: Move) -> None:
        kind = move[0]
        if kind in left:
            left[kind] -= 1
        if kind == "hello":
            world.hello(move[1])
        elif kind == "up":
            world.deliver_up(move[1])
        elif kind == "down":
            world.deliver_down(move[1])
        elif kind == "heartbeat":
            world.up[move[1]].append(world.senders[move[1]].heartbeat())
        elif kind == "answer":
            world.answer(move[1])
        elif kind == "refuse":
            world.refuse(move[1])
        elif kind == "refusal":
            world.note_refusal(*move[1])
        elif kind == "flush":
            world.flush(move[1])
        elif kind == "send":
            try:
                world.send(world.tasks[move[1]], move[2])
            except MediaTooLarge:
                world.tasks[move[1]].state = "failed"
        elif kind == "abort":
            world.abort(world.tasks[move[1]])
        elif kind == "finish":
            world.finish(move[1], move[2])
        elif kind == "evict":
            self._evict(world.receivers[move[1]], move[2], move[3])
        elif kind == "break":
            world.break_link(move[1], list(move[2]), list(move[3]), notice=bool(move[4]))
        elif kind == "crash_engine":
            world.crash_engine(move[1])
            for link in world.links:
                if link[1] == move[1] and not self.instance.silent:
                    world.break_link(link, [], [], notice=False)
        elif kind == "crash_frontend":
            world.crash_frontend(move[1])
        elif kind == "reset":
            world.receivers[move[1]].reset()
        elif kind == "shrink":
            world.receivers[move[1]].resize(0)
        for engine in range(self.instance.engines):
            world.take(engine)

    @staticmethod
    def _evict(receiver: Receiver, place: str, h: bytes) -> None:
        """Any policy: an idle value is announced as evicted, one in limbo is freed."""
        store = receiver.store
        if place == "idle":
            entry = store.idle.pop(h)
            store.idle_bytes -= entry.size_bytes
            store.limbo[h] = entry
            store.limbo_bytes += entry.size_bytes
            store.changed[h] = None
        else:
            store.limbo_bytes -= store.limbo.pop(h).size_bytes
        receiver._settle()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=list(INSTANCES))
    parser.add_argument("--states", type=int, default=10**7)
    parser.add_argument(
        "--seconds", type=float, default=1e9, help="for each instance; one cut short is no proof"
    )
    options = parser.parse_args()
    for name in options.names:
        started = time.monotonic()
        search = Search(INSTANCES[name])
        search.run(options.states, options.seconds)
        how = "complete" if search.is_complete else "stopped"
        seconds = time.monotonic() - started
        print(f"{name:24} {how:9} {search.num_states:9,} states {seconds:7.1f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())


__all__ = ["INSTANCES", "Instance", "Search"]
