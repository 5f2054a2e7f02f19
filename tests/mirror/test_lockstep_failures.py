"""The five ways in which two mirrored LRU lists are known to drift apart, and that ours heals.

`LockStep` is the classic scheme in a few lines: both sides run the same LRU over the same calls and
nothing is ever sent back. Each test first makes it fail ("Expected a cached item"), then does the
same to the mirror, where everything ends well.
"""

from collections import OrderedDict

import pytest
from mirror_world import World, mm_hash, value_bytes

from foveal_runtime.mirror.facade import MissingValues, ReceiverCache, SenderCache
from foveal_runtime.mirror.receiver import ReceiverLimits
from foveal_runtime.plan.errors import MediaTooLarge

SIZES = [10] * 12


class LockStep:
    """One side's list: `send` for the frontend, `restore` for the engine. Room for two items."""

    def __init__(self) -> None:
        self.lru: OrderedDict[int, bytes] = OrderedDict()

    def _put(self, key: int, value: bytes) -> None:
        self.lru[key] = value
        self.lru.move_to_end(key)
        while len(self.lru) > 2:
            self.lru.popitem(last=False)

    def send(self, key: int) -> bytes | None:
        known = key in self.lru
        self._put(key, b"")
        return None if known else value_bytes(key, 10)

    def restore(self, key: int, value: bytes | None) -> bytes:
        if value is None:
            assert key in self.lru, "Expected a cached item"
            value = self.lru[key]
        self._put(key, value)
        return value


def world(frontends: int = 1) -> World:
    limits = ReceiverLimits(
        capacity_bytes=20, staging_bytes=80, grace_bytes=0, max_cacheable_bytes=20,
        max_window_bytes=25, window_divisor=1,
    )  # fmt: skip
    made = World(frontends, 1, SIZES, limits)
    made.settle()
    return made


def ask(w: World, *items: int, frontend: int = 0):
    task = w.add_task(frontend, items)
    w.send(task, 0)
    return task


def test_two_senders():
    """Two API servers each keep a list of what one engine has; the engine's one list follows
    neither of them, and a hit of the one was evicted by the other."""
    one, two, engine = LockStep(), LockStep(), LockStep()
    engine.restore(1, one.send(1))
    engine.restore(2, two.send(2))
    engine.restore(3, two.send(3))  # evicts 1 here, not in the first sender's list
    with pytest.raises(AssertionError, match="Expected a cached item"):
        engine.restore(1, one.send(1))

    w = world(frontends=2)
    ask(w, 1)
    w.settle()
    ask(w, 2, 3, frontend=1)
    late = ask(w, 1)  # still believes in 1 when it sends
    w.settle()
    assert w.is_settled()
    assert late.state == "done"


def test_engine_restart():
    """The engine process is replaced; the frontend still lists what the old one had."""
    frontend, engine = LockStep(), LockStep()
    engine.restore(1, frontend.send(1))
    engine = LockStep()
    with pytest.raises(AssertionError, match="Expected a cached item"):
        engine.restore(1, frontend.send(1))

    w = world()
    ask(w, 1)
    w.settle()
    w.crash_engine(0)
    task = ask(w, 1)  # nobody has told the frontend yet
    w.settle()  # BYE, a new session, sent again
    assert task.state == "done"
    assert task.attempt == 2


def test_one_sided_reset():
    """Sleep mode, a pause or a debug endpoint clears the engine's cache alone."""
    frontend, engine = LockStep(), LockStep()
    engine.restore(1, frontend.send(1))
    engine.lru.clear()
    with pytest.raises(AssertionError, match="Expected a cached item"):
        engine.restore(1, frontend.send(1))

    w = world()
    ask(w, 1)
    w.settle()
    w.receivers[0].reset()
    task = ask(w, 1)
    w.settle()
    assert task.state == "done"
    assert w.receivers[0].stats.num_needs_stale == 1


def test_rejected_after_the_mirror_was_updated():
    """A prompt turns out too long after its images entered the list; the values never leave, but
    the next request with the same image goes out as a hash."""
    frontend, engine = LockStep(), LockStep()
    frontend.send(1)  # and then the request is refused
    with pytest.raises(AssertionError, match="Expected a cached item"):
        engine.restore(1, frontend.send(1))

    w = world()
    with pytest.raises(MediaTooLarge):
        ask(w, *range(10))
    assert w.senders[0, 0].next_n == 1
    for index in range(10):
        assert not w.senders[0, 0].believes(mm_hash(index))
    w.tasks.clear()
    task = ask(w, 1)
    assert w.senders[0, 0].stats.num_hits == 0
    w.settle()
    assert task.state == "done"


def test_sent_in_another_order_than_updated():
    """Two requests update the list in one order and reach the socket in the other."""
    frontend, engine = LockStep(), LockStep()
    first, second = frontend.send(1), frontend.send(1)
    with pytest.raises(AssertionError, match="Expected a cached item"):
        engine.restore(1, second)
    assert first is not None

    w = world()
    sender = w.senders[0, 0]
    plans = [sender.plan_send(w.send_items((1,))) for _ in range(2)]
    assert plans == [[mm_hash(1)], [mm_hash(1)]]  # planning changes nothing
    tasks = [w.add_task(0, (1,)), w.add_task(0, (1,))]
    for task in reversed(tasks):  # each is stamped in the step that sends it
        w.send(task, 0)
    w.settle()
    assert [task.state for task in tasks] == ["done", "done"]
    assert w.receivers[0].stats.num_needs_pull == w.receivers[0].stats.num_needs_stale == 0


# ---- the classic call shape --------------------------------------------------------------------
def _facade(capacity: int = 100):
    w = World(1, 1, SIZES, ReceiverLimits(capacity_bytes=capacity, grace_bytes=0,
                                          max_cacheable_bytes=capacity))  # fmt: skip
    w.settle()
    return w, SenderCache(w.senders[0, 0]), ReceiverCache(w.receivers[0], "f0")


def _pass(w: World, frontend: SenderCache, engine: ReceiverCache, indexes: list[int]) -> list:
    items = [value_bytes(i, 10) for i in indexes]
    hashes = [mm_hash(i) for i in indexes]
    sent = frontend.get_and_update(items, hashes)
    assert [bytes(v) for v in engine.get_and_update(sent, hashes)] == items
    if w.flush((0, 0)):
        w.deliver_down((0, 0))
    w.check()
    return [item is not None for item in sent]


def test_get_and_update_sends_an_item_once():
    w, frontend, engine = _facade()
    assert _pass(w, frontend, engine, [1, 2, 1]) == [True, True, False]
    assert _pass(w, frontend, engine, [2, 3]) == [False, True]
    assert _pass(w, frontend, engine, [1, 2, 3]) == [False, False, False]


def test_get_and_update_follows_evictions():
    w, frontend, engine = _facade(capacity=20)
    assert _pass(w, frontend, engine, [1, 2]) == [True, True]
    assert _pass(w, frontend, engine, [1]) == [False]
    assert _pass(w, frontend, engine, [3]) == [True]  # evicts 2, the least recently used
    assert _pass(w, frontend, engine, [1]) == [False]
    assert _pass(w, frontend, engine, [2]) == [True]


def test_reset_of_either_side_is_safe():
    w, frontend, engine = _facade()
    _pass(w, frontend, engine, [1])
    frontend.reset()
    assert frontend.get_and_update([value_bytes(1, 10)], [mm_hash(1)]) == [value_bytes(1, 10)]
    assert engine.get_and_update([value_bytes(1, 10)], [mm_hash(1)]) == [value_bytes(1, 10)]
    engine.reset()
    stale = frontend.get_and_update([value_bytes(1, 10)] * 2, [mm_hash(1), mm_hash(1)])
    assert stale == [None, None]
    with pytest.raises(MissingValues) as caught:
        engine.get_and_update(stale, [mm_hash(1), mm_hash(1)])
    assert caught.value.hashes == [mm_hash(1)]


def test_an_item_larger_than_the_cache_is_passed_on_and_not_kept():
    w, frontend, engine = _facade(capacity=5)
    for _ in range(2):
        assert _pass(w, frontend, engine, [1]) == [True]
    assert w.receivers[0].directory() == ()
