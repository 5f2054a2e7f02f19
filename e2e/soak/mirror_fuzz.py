"""Random schedules over the mirror's state machines: every guarantee holds after every step.

Up to 4 frontends and 3 engines; streams that break and lose messages, engine and frontend crashes,
aborts, resets, resizes (to zero, too), injected values, uuid bindings, preemption, sources that
cannot answer; item sizes around the cache, the window and nothing. Each run is one seed:

    python e2e/soak/mirror_fuzz.py --seed 7 --steps 1      # replays run 7
    python e2e/soak/mirror_fuzz.py --steps 1000000         # runs 0, 1, 2, ... until enough steps
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter

from mirror_world import Link, Task, Violation, World, mm_hash

from foveal_runtime.mirror.admission import State
from foveal_runtime.mirror.receiver import Receiver, ReceiverLimits
from foveal_runtime.mirror.store import Entry
from foveal_runtime.plan.errors import MediaTooLarge
from foveal_runtime.plan.media import MMHash

MAX_STEPS = 20_000
FAULTS = (
    "break", "crash_engine", "crash_frontend", "reset", "resize", "put", "requeue",
    "unmakeable", "conflict", "abort", "abort", "refusal", "refusal", "damage", "differ",
)  # fmt: skip


class Run:
    """One seeded run. `receiver_type` may be a weakened one (the checker's tests)."""

    def __init__(self, seed: int, *, receiver_type: type[Receiver] = Receiver) -> None:
        self.rng = rng = random.Random(seed)
        num_items = rng.randint(1, 6)
        self.sizes = [rng.choice((1, 2, 3, 4, 4, 8)) for _ in range(num_items)]
        limits = ReceiverLimits(
            capacity_bytes=rng.choice((0, 3, 4, 6, 8, 12, 12, 20)),
            staging_bytes=rng.choice((0, 4, 8, 16, 40)),
            largest_request_bytes=rng.choice((0, 4, 8)),
            grace_bytes=rng.choice((0, 0, 1, 3)),
            max_cacheable_bytes=rng.choice((None, 3, 100, 100)),
            max_window_bytes=rng.choice((0, 2, 4, 8, 100)),
            window_divisor=1 + seed % 3,
            max_bindings=rng.choice((0, 2, 100)),
            max_queued=rng.choice((3, 1000)),
        )
        self.world = World(
            rng.randint(1, 4),
            rng.randint(1, 3),
            self.sizes,
            limits,
            receiver_type=receiver_type,
            codec=rng.random() < 0.3,
        )
        self.faults = rng.choice((0, 2, 4, 8, 16))
        self.rivals = rng.choice((0, 0, 1, 4))
        self.lazy = rng.random() < 0.5
        self.counts: Counter[str] = Counter()
        for _ in range(rng.randint(1, 24)):
            count = min(num_items, rng.choice((0, 1, 1, 1, 2, 3)))
            source = rng.choice((-1, -1, -1, 0, 1))
            items = tuple(rng.sample(range(num_items), count))
            self.world.add_task(rng.randrange(len({f for f, _ in self.world.links})), items, source)

    def run(self) -> Counter[str]:
        """Until everything is settled. Returns what happened how often."""
        for _ in range(MAX_STEPS):
            moves = self._moves()
            if not moves:
                break
            move = self.rng.choice(moves)
            self.counts["steps"] += 1
            self.counts[move[0]] += 1
            getattr(self, "_" + move[0])(*move[1:])
            self.world.check()
        else:
            raise Violation("I3: not settled")
        if not self.world.is_settled():
            raise Violation("I3: a request is stuck")
        self.world.check_end()
        for link in self.world.links:
            if not self.world.is_quiet(link):
                raise Violation("I6: a link does not come to rest")
        for receiver in self.world.receivers:
            stats = receiver.stats
            self.counts["needs"] += stats.num_needs_pull + stats.num_needs_stale
            self.counts["stale"] += stats.num_needs_stale
            self.counts["bypasses"] += stats.num_bypass_requests
            self.counts["borrowed"] += receiver.store.num_borrowed
            self.counts["rescued"] += receiver.store.num_rescued
            self.counts["refetched"] += stats.num_damaged_values
            self.counts["replaced"] += stats.num_value_conflicts
        return self.counts

    # ---- which moves there are -----------------------------------------------------------------
    def _moves(self) -> list[tuple]:
        world, moves = self.world, []
        for link in world.links:
            if world.broken[link]:
                moves.append(("hello", link))
            if world.up[link]:
                moves.append(("up", link))
            if world.down[link]:
                moves.append(("down", link))
            if world.needs[link]:
                moves.append(("answer", link))
            if world.senders[link].owes_refusals():
                moves.append(("refuse", link))
            if world.has_news(link):
                moves.append(("flush", link))
        for task in world.tasks.values():
            if task.state == "new":
                moves += [("send", task, e) for f, e in world.links if self._can_send(task, f, e)]
        for engine in range(len(world.receivers)):
            if self.lazy and world.has_news_for_core(engine):
                moves.append(("take", engine))
            moves += [("finish", engine, key) for key in world.running[engine]]
        if self.rivals > 0:
            moves += self._rivals()
        if self.faults > 0 and (not moves or self.rng.random() < 0.1):
            return [("fault", self.rng.choice(FAULTS))]
        return moves

    def _can_send(self, task: Task, frontend: int, engine: int) -> bool:
        return frontend == task.frontend and self.world.senders[frontend, engine].is_up

    def on_this_world(self, move: tuple) -> tuple:
        """A move made for another copy of the world, for this one."""
        tasks = self.world.tasks
        return tuple(tasks[part.name] if isinstance(part, Task) else part for part in move)

    # ---- ordinary moves ------------------------------------------------------------------------
    def _hello(self, link: Link) -> None:
        self.world.hello(link)

    def _up(self, link: Link) -> None:
        self.world.deliver_up(link)
        self._eager(link[1])

    def _down(self, link: Link) -> None:
        self.world.deliver_down(link)

    def _answer(self, link: Link) -> None:
        self.world.answer(link)

    def _refuse(self, link: Link) -> None:
        self.world.refuse(link)

    def _flush(self, link: Link) -> None:
        self.world.flush(link)

    def _take(self, engine: int) -> None:
        self.world.take(engine)

    def _finish(self, engine: int, key: tuple) -> None:
        if key in self.world.receivers[engine].admission.lost:
            self.world.take(engine)
            return
        self.world.finish(engine, key)
        self._eager(engine)

    def _send(self, task: Task, engine: int) -> None:
        binds = [(b"%032d" % i, mm_hash(i)) for i in task.items if self.rng.random() < 0.3]
        try:
            self.world.send(task, engine, binds=binds)
        except MediaTooLarge:
            task.state = "failed"

    def _rivals(self) -> list[tuple]:
        """Whose frontend does not know of a value that an engine has, and so brings its own."""
        return [
            ("rival", link, mm_hash)
            for link, sender in self.world.senders.items()
            if sender.is_up
            for mm_hash in self._stored(link[1])
            if sender.plan_send(self.world.send_items((int(mm_hash),)))
            and self._may_differ(link[1], mm_hash)
        ]

    def _rival(self, link: Link, mm_hash: MMHash) -> None:
        """One more request brings a value while the engine has a wrong one, which it replaces."""
        self.rivals -= 1
        self._make_differ(link[1], mm_hash)
        self._send(self.world.add_task(link[0], (int(mm_hash),)), link[1])

    def _eager(self, engine: int) -> None:
        if not self.lazy:
            self.world.take(engine)

    # ---- faults --------------------------------------------------------------------------------
    def _fault(self, kind: str) -> None:
        self.faults -= 1
        self.counts[kind] += 1
        link = self.rng.choice(self.world.links)
        getattr(self, "_fault_" + kind)(link)
        self._eager(link[1])

    def _some(self, count: int) -> list[bool]:
        return [self.rng.random() < 0.6 for _ in range(count)]

    def _fault_abort(self, link: Link) -> None:
        sent = [task for task in self.world.tasks.values() if task.state == "sent"]
        if sent:
            self.world.abort(self.rng.choice(sent))

    def _fault_break(self, link: Link) -> None:
        up, down = self._some(len(self.world.up[link])), self._some(len(self.world.down[link]))
        self.world.break_link(link, up, down, notice=self.rng.random() < 0.5)

    def _fault_crash_engine(self, link: Link) -> None:
        self.world.crash_engine(link[1])
        for other in self.world.links:
            if other[1] == link[1]:
                self._fault_break(other)

    def _fault_crash_frontend(self, link: Link) -> None:
        for other in self.world.links:
            if other[0] == link[0]:
                self._fault_break(other)
        self.world.crash_frontend(link[0])

    def _fault_reset(self, link: Link) -> None:
        sender = self.world.senders[link]
        if sender.is_up and self.rng.random() < 0.5:
            self.world.up[link].append(sender.control("reset_mm"))
        else:
            self.world.receivers[link[1]].reset()

    def _fault_resize(self, link: Link) -> None:
        self.world.receivers[link[1]].resize(self.rng.choice((0, 4, 8, 12, 20)))

    def _fault_put(self, link: Link) -> None:
        if self.world.senders[link].is_up:
            self.world.put(link, (self.rng.randrange(len(self.sizes)),))

    def _fault_requeue(self, link: Link) -> None:
        """The scheduler preempts a request whose values were released after encoding."""
        running = self.world.running[link[1]]
        if running:
            receiver = self.world.receivers[link[1]]
            key = self.rng.choice(list(running))
            for h in running[key].items:
                if self.rng.random() < 0.5:
                    receiver.release_value(*key, h)
            del running[key]
            receiver.requeue(*key)

    def _fault_unmakeable(self, link: Link) -> None:
        self.world.unmakeable.add(self.rng.randrange(len(self.sizes)))

    def _fault_refusal(self, link: Link) -> None:
        """A request is convicted at a frontend (1 to 4), or the book is cleared there (0)."""
        self.world.note_refusal(link[0], self.rng.randrange(5), self.rng.choice((1.0, 2.0, 3.0)))

    def _stored(self, engine: int) -> dict[MMHash, Entry]:
        """The values of an engine, wherever they are."""
        store = self.world.receivers[engine].store
        found = [*store.idle.items(), *store.limbo.items(), *store.pinned.items()]
        return {h: entry for h, entry in found if entry.value is not None}

    def _fault_damage(self, link: Link) -> None:
        """The bytes of a stored value change; its digest does not."""
        stored = list(self._stored(link[1]).values())
        if stored:
            entry = self.rng.choice(stored)
            entry.value = self.world.damage(entry.value)

    def _fault_differ(self, link: Link) -> None:
        """A stored value has another digest than the copies that frontends have."""
        stored = [h for h in self._stored(link[1]) if self._may_differ(link[1], h)]
        if stored:
            self._make_differ(link[1], self.rng.choice(stored))

    def _may_differ(self, engine: int, mm_hash: MMHash) -> bool:
        """Nobody may be about to get it who brought one."""
        requests = self.world.receivers[engine].admission.requests.values()
        pinned = mm_hash in self.world.receivers[engine].store.pinned
        holders = [r for r in requests if pinned and mm_hash in r.held]
        return all(request.state is State.RUNNING for request in holders)

    def _make_differ(self, engine: int, mm_hash: MMHash) -> None:
        entry = self._stored(engine)[mm_hash]
        assert entry.value is not None
        entry.value = entry.value._replace(digest=b"differs!")

    def _fault_conflict(self, link: Link) -> None:
        """A frontend binds a uuid to another item."""
        index = self.rng.randrange(len(self.sizes))
        if self.world.senders[link].is_up:
            binds = ((b"%032d" % index, mm_hash((index + 1) % len(self.sizes))),)
            self.world.put(link, (), binds)


def fuzz(first_seed: int, num_steps: int, max_seconds: float = 1e9) -> tuple[int, Counter[str]]:
    """Runs seed after seed until `num_steps` steps. Returns (number of runs, counts)."""
    total: Counter[str] = Counter()
    seed, end = first_seed, time.monotonic() + max_seconds
    while total["steps"] < num_steps and time.monotonic() < end:
        try:
            total += Run(seed).run()
        except BaseException:
            print(f"replay with: python e2e/soak/mirror_fuzz.py --seed {seed} --steps 1")
            raise
        seed += 1
    return seed - first_seed, total


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=1_000_000)
    options = parser.parse_args()
    started = time.monotonic()
    runs, counts = fuzz(options.seed, options.steps)
    seconds = time.monotonic() - started
    print(f"{runs} runs, {counts['steps']} steps in {seconds:.0f} s; every guarantee held")
    print(", ".join(f"{name} {count}" for name, count in sorted(counts.items())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
