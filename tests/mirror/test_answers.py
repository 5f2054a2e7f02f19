"""What each half tells the other on its own: news that come alone, and answers nobody asked for."""

import pytest
from mirror_world import World, mm_hash, value_bytes

from foveal_runtime.mirror.messages import Fill, InlineValue, NoFill, SharedValue
from foveal_runtime.mirror.receiver import ReceiverLimits
from foveal_runtime.mirror.sender import SendItem, SendValue

ALIAS = b"u" * 32


def world(frontends: int = 1, **settings: int) -> World:
    limits = {"capacity_bytes": 100, "staging_bytes": 200, "grace_bytes": 0, "window_divisor": 1}
    made = World(frontends, 1, [10] * 10, ReceiverLimits(**limits | settings), codec=True)
    made.settle()
    return made


def test_a_frontend_answers_only_what_was_asked():
    sender = world().senders[0, 0]
    assert sender.fill(mm_hash(1), SendValue(value_bytes(1, 10), b"digest")) is None
    assert sender.nofill(mm_hash(1)) is None
    assert sender.abort(("unknown", 1)) is None
    assert sender.next_n == 1


def test_an_engine_ignores_answers_that_it_did_not_ask_for():
    w = world()
    receiver, sid = w.receivers[0], w.senders[0, 0].sid
    assert receiver.on_message("f0", NoFill(sid, 1, mm_hash(1))) == []
    assert receiver.on_message("f0", Fill(sid, 2, mm_hash(1), 10, InlineValue(1, b"digest"))) == []
    assert (receiver.stats.num_nofill, receiver.directory()) == (0, ())


def test_a_binding_alone_is_news():
    w = world(frontends=2)
    for binds in ((), ((ALIAS, mm_hash(1)),)):
        w.put((0, 0), (1,), binds)
        w.settle()
    assert w.senders[1, 0].lookup_binding(ALIAS) == mm_hash(1)


def test_a_capacity_alone_is_news():
    w = world()
    for capacity_bytes in (50, 100):
        w.receivers[0].resize(capacity_bytes)
        w.settle()
        assert w.senders[0, 0].capacity_bytes == capacity_bytes


def test_a_cache_grows_no_larger_than_it_was_at_the_start():
    """A pod's memory is planned for that much: with more, its kernel ends the engine."""
    w = world()
    for asked_bytes, capacity_bytes in ((150, 100), (50, 50), (2**40, 100)):
        w.receivers[0].resize(asked_bytes)
        w.settle()
        assert w.receivers[0].store.capacity_bytes == capacity_bytes
        assert w.senders[0, 0].capacity_bytes == capacity_bytes
    off = world(capacity_bytes=0)
    off.receivers[0].resize(100)
    assert off.receivers[0].store.capacity_bytes == 0


def test_a_refusal_alone_is_news():
    w = world(frontends=2)
    w.note_refusal(0, 1, 1.0)
    w.refuse((0, 0))
    w.settle()
    assert w.books[1].snapshot() == w.books[0].snapshot()


def test_a_request_that_can_never_fit_is_refused_at_once_behind_one_that_waits():
    w = world(capacity_bytes=20, staging_bytes=20, max_window_bytes=0)
    w.senders[0, 0].capacity_bytes = 100  # as before a shrink that it has not heard of
    for items in ((1, 2), (3, 4)):
        w.send(w.add_task(0, items), 0)
        w.deliver_up((0, 0))
    w.flush((0, 0))
    w.deliver_down((0, 0))
    hopeless = w.add_task(0, (5, 6, 7, 8, 9))
    w.send(hopeless, 0)
    w.deliver_up((0, 0))
    assert w.receivers[0].wants_immediate_flush("f0")
    assert w.flush((0, 0))
    w.deliver_down((0, 0))
    assert hopeless.state == "failed"


def test_what_is_put_takes_window_until_it_is_acknowledged():
    w = world(max_window_bytes=20)
    w.put((0, 0), (1, 2))
    assert not w.send(w.add_task(0, (3,)), 0).frames, "the engine will ask"
    w.settle()
    assert w.senders[0, 0].inflight_bytes == 0
    assert w.send(w.add_task(0, (4,)), 0).frames


@pytest.mark.parametrize(
    ("node", "engine_node", "is_shared"),
    [("here", "here", True), ("here", "elsewhere", False), ("", "", False)],
)
def test_shared_memory_is_named_only_to_an_engine_of_the_same_node(node, engine_node, is_shared):
    w = world()
    sender = w.senders[0, 0]
    sender.node, sender.engine_node = node, engine_node
    value = SendValue(value_bytes(1, 10), b"digest", "shared")
    sending = sender.put([SendItem(mm_hash(1), 10)], {mm_hash(1): value})
    [item] = sending.message.items
    assert isinstance(item.value, SharedValue if is_shared else InlineValue)
    assert len(sending.frames) == (not is_shared)


def test_both_halves_take_a_quarter_of_the_capacity_as_the_largest_value_kept():
    w = World(1, 1, [25, 26], ReceiverLimits(capacity_bytes=100, window_divisor=1), codec=True)
    w.settle()
    w.send(w.add_task(0, (0, 1)), 0)
    sender = w.senders[0, 0]
    assert [sender.believes(mm_hash(i)) for i in (0, 1)] == [True, False]
    w.settle()
    assert [int(a.mm_hash) for a in w.receivers[0].directory()] == [0]
