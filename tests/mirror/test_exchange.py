"""Both halves of the mirror talk to each other: hits, needs, rejections, bypass, bindings."""

import msgspec
import pytest
from mirror_world import NAMESPACE, Violation, World, mm_hash, value_bytes

from foveal_runtime.mirror.messages import (
    NIL,
    PROTOCOL_VERSION,
    Bye,
    Down,
    Hello,
    Req,
    Welcome,
)
from foveal_runtime.mirror.receiver import ReceiverLimits
from foveal_runtime.mirror.sender import Sender
from foveal_runtime.plan.errors import MediaTooLarge, Overloaded


def limits(capacity: int = 100, **kwargs: object) -> ReceiverLimits:
    base = {"staging_bytes": 200, "grace_bytes": 0, "max_cacheable_bytes": capacity}
    base |= {"window_divisor": 1} | kwargs  # type: ignore[dict-item]
    return ReceiverLimits(capacity_bytes=capacity, **base)


def world(frontends: int = 1, engines: int = 1, sizes: tuple[int, ...] = (10,) * 10, **kw) -> World:
    made = World(frontends, engines, list(sizes), limits(**kw), codec=True)
    made.settle()
    return made


def carried(sending) -> list[int]:
    return [int(item.mm_hash) for item in sending.message.items if item.value is not None]


def test_a_repeat_costs_a_hash():
    w = world()
    first = w.send(w.add_task(0, (1, 2)), 0)
    assert carried(first) == [1, 2]
    w.settle()
    again = w.send(w.add_task(0, (2, 1)), 0)
    assert carried(again) == []
    w.settle()
    assert w.is_settled()
    stats = w.senders[0, 0].stats
    assert (stats.num_queries, stats.num_hits, stats.bytes_avoided) == (4, 2, 20)
    assert w.receivers[0].stats.num_needs_stale == w.receivers[0].stats.num_needs_pull == 0


def test_the_second_request_hits_before_the_first_is_acknowledged():
    w = world()
    w.send(w.add_task(0, (1,)), 0)
    assert carried(w.send(w.add_task(0, (1,)), 0)) == []
    w.settle()
    assert w.is_settled()


def test_what_one_frontend_sent_another_need_not_send():
    w = world(frontends=3)
    w.send(w.add_task(0, (1,)), 0)
    w.settle()
    assert carried(w.send(w.add_task(1, (1,)), 0)) == []
    size_bytes, meta = w.senders[2, 0].confirmed[mm_hash(1)]
    assert (size_bytes, meta.num_tokens) == (10, 1)
    w.settle()


def test_a_hint_that_came_too_late_is_healed_by_need():
    w = world(capacity=20)
    w.send(w.add_task(0, (1, 2)), 0)
    w.settle()
    w.send(w.add_task(0, (3, 4)), 0)  # evicts 1 and 2 while the next one is on its way
    stale = w.send(w.add_task(0, (1,)), 0)
    assert carried(stale) == []
    w.settle()
    assert w.is_settled()
    assert w.receivers[0].stats.num_needs_stale == 1
    assert w.senders[0, 0].stats.bytes_sent["fill"] == 10


def test_a_full_window_pulls():
    w = world(staging_bytes=30, max_window_bytes=15)
    sending = w.send(w.add_task(0, (1, 2, 3)), 0)
    assert carried(sending) == [1]
    assert w.senders[0, 0].stats.num_pulls == 2
    w.settle()
    assert w.is_settled()
    assert w.receivers[0].stats.num_needs_pull == 2


def test_requests_larger_than_the_cache_go_past_it():
    w = world(capacity=15, sizes=(10,) * 10)
    w.send(w.add_task(0, (0,)), 0)
    w.settle()
    w.send(w.add_task(0, (1, 2, 3)), 0)
    w.settle()
    receiver = w.receivers[0]
    assert w.is_settled()
    assert receiver.stats.num_bypass_requests == 1
    assert [int(a.mm_hash) for a in receiver.directory()] == [0]  # nothing evicted or announced


@pytest.mark.parametrize(("capacity", "staging"), [(0, 50), (10, 50), (30, 50), (49, 50), (7, 50)])
def test_a_request_as_large_as_the_staging_is_served_whatever_the_cache(capacity, staging):
    """Windows must never eat the room of the largest request (they once took half of S)."""
    w = world(capacity=capacity, staging_bytes=staging, frontends=2)
    w.send(w.add_task(1, (6,)), 0)
    w.send(w.add_task(0, (1, 2, 3, 4, 5)), 0)
    w.send(w.add_task(1, (5, 4, 3, 2, 1)), 0)
    w.settle()
    assert all(task.state == "done" for task in w.tasks.values())
    w.check_end()


def test_a_cache_that_holds_every_request_leaves_all_staging_to_windows():
    assert limits(capacity=200).window_pool_bytes == 200
    assert limits(capacity=50, largest_request_bytes=50).window_pool_bytes == 200
    assert limits(capacity=50).window_pool_bytes == 50
    assert limits(capacity=0).window_pool_bytes == 0
    assert limits(capacity=0, largest_request_bytes=20).window_pool_bytes == 100


def test_a_cache_of_size_zero_serves_everything_past_it():
    w = world(capacity=0, largest_request_bytes=20)
    for _ in range(2):
        sending = w.send(w.add_task(0, (1, 2)), 0)
        assert carried(sending) == [1, 2]
        w.settle()
    assert w.is_settled()
    assert w.receivers[0].directory() == ()
    assert not w.senders[0, 0].believes(mm_hash(1))


def test_above_cache_and_staging_the_frontend_says_so_before_sending():
    w = world(capacity=15, staging_bytes=40)  # C + S - window
    with pytest.raises(MediaTooLarge, match="at most 40"):
        w.send(w.add_task(0, (1, 2, 3, 4, 5)), 0)
    assert w.senders[0, 0].next_n == 1
    assert not w.senders[0, 0].unfinished


def test_a_request_that_no_longer_fits_after_a_shrink_is_rejected_not_lost():
    w = world(capacity=100, staging_bytes=40, max_window_bytes=0)
    task = w.add_task(0, (1, 2, 3))
    w.send(task, 0)
    w.receivers[0].resize(20)
    w.settle()
    assert task.state == "failed"
    assert w.receivers[0].stats.rejects == {"mm_too_large": 1}
    assert w.senders[0, 0].capacity_bytes == 20


def test_items_above_max_cacheable_are_used_and_forgotten():
    w = world(max_cacheable_bytes=10, sizes=(10, 20))
    w.send(w.add_task(0, (0, 1)), 0)
    w.settle()
    assert [int(a.mm_hash) for a in w.receivers[0].directory()] == [0]
    assert carried(w.send(w.add_task(0, (0, 1)), 0)) == [1]
    w.settle()
    assert w.is_settled()


def test_the_head_waits_for_room_and_nobody_overtakes():
    w = world(capacity=20)
    receiver = w.receivers[0]
    for items in ((1, 2), (3, 4), (1,)):
        w.send(w.add_task(0, items), 0)
        w.deliver_up((0, 0))
    w.take(0)
    assert [key[1][0] for key in w.running[0]] == ["0"]
    assert len(receiver.admission.queue) == 2
    assert receiver.sessions["f0"].lookup_ack() == 1
    w.settle()
    assert w.is_settled()


def test_a_source_is_asked_first_then_the_requester():
    w = world(frontends=2, max_window_bytes=0)
    w.send(w.add_task(0, (1,), source=1), 0)
    w.deliver_up((0, 0))
    assert w.flush((1, 0))
    w.deliver_down((1, 0))
    assert list(w.needs[1, 0]) == [mm_hash(1)]
    w.answer((1, 0))  # has no use for it: NOFILL, the requester is asked
    w.deliver_up((1, 0))
    w.flush((0, 0))
    w.deliver_down((0, 0))
    assert list(w.needs[0, 0]) == [mm_hash(1)]
    assert w.senders[1, 0].stats.num_nofill == w.receivers[0].stats.num_nofill == 1
    w.settle()
    assert w.is_settled()


def test_a_value_nobody_can_make_rejects_its_requests():
    w = world(frontends=2, max_window_bytes=0)
    w.unmakeable.add(1)
    one, other = w.add_task(0, (1,)), w.add_task(1, (1, 2))
    w.send(one, 0)
    w.send(other, 0)
    w.settle()
    assert (one.state, other.state) == ("failed", "failed")
    assert w.receivers[0].stats.rejects == {"mm_source_lost": 2}
    w.check_end()


def test_when_the_asked_frontend_dies_another_waiter_is_asked():
    w = world(frontends=2, max_window_bytes=0)
    w.send(w.add_task(0, (1,)), 0)
    survivor = w.add_task(1, (1,))
    w.send(survivor, 0)
    w.deliver_up((0, 0))
    w.deliver_up((1, 0))
    w.receivers[0].on_session_lost("f0")
    w.crash_frontend(0)
    w.settle()
    assert survivor.state == "done"
    w.check_end()


def test_put_values_are_announced_to_everybody():
    w = world(frontends=2)
    assert w.put((0, 0), (5, 6))
    w.settle()
    assert w.senders[1, 0].believes(mm_hash(5))
    assert not w.put((0, 0), (5, 6))


def test_a_uuid_is_bound_once_and_known_everywhere():
    w = world(frontends=2)
    alias = b"u" * 32
    w.send(w.add_task(0, (1,)), 0, binds=[(alias, mm_hash(1))])
    w.settle()
    assert w.senders[1, 0].lookup_binding(alias) == mm_hash(1)
    thief = w.add_task(1, (2,))
    w.send(thief, 0, binds=[(alias, mm_hash(2))])
    w.settle()
    assert thief.state == "failed"
    assert w.receivers[0].stats.rejects == {"media_conflict": 1}
    assert w.receivers[0].bindings.lookup(alias) == mm_hash(1)


def test_old_bindings_go_and_are_announced_as_gone():
    w = world(frontends=2, max_bindings=2)
    for i in range(3):
        w.send(w.add_task(0, (i,)), 0, binds=[(b"%032d" % i, mm_hash(i))])
        w.settle()
    for sender in w.senders.values():
        assert set(sender.bindings) == {b"%032d" % 1, b"%032d" % 2}


def test_an_aborted_running_request_keeps_its_pins_until_the_core_stops_it():
    w = world()
    task = w.add_task(0, (1,))
    w.send(task, 0)
    w.deliver_up((0, 0))
    receiver = w.receivers[0]
    [ready] = receiver.take_ready()
    w.abort(task)
    w.deliver_up((0, 0))
    assert receiver.store.pinned_bytes == 10
    assert receiver.take_aborted() == [("f0", ready.rid)]
    assert receiver.finish("f0", ready.rid)
    assert not receiver.finish("f0", ready.rid)
    assert receiver.store.pinned_bytes == 0


def test_a_value_may_be_released_early_and_asked_for_again():
    w = world(capacity=10)
    task = w.add_task(0, (1,))
    w.send(task, 0)
    w.deliver_up((0, 0))
    receiver = w.receivers[0]
    [ready] = receiver.take_ready()
    receiver.release_value("f0", ready.rid, mm_hash(1))
    w.senders[0, 0].window_bytes = 10
    w.flush((0, 0))
    w.deliver_down((0, 0))
    assert w.put((0, 0), (2,))  # takes the room
    w.deliver_up((0, 0))
    receiver.requeue("f0", ready.rid)
    assert receiver.take_ready() == []
    w.settle()  # NEED, FILL, and here it is again
    assert task.state == "done"


def test_reset_frees_what_is_unpinned_now_and_the_rest_at_its_last_unpin():
    w = world()
    w.send(w.add_task(0, (1,)), 0)
    w.settle()
    running = w.add_task(0, (2,))
    w.send(running, 0)
    w.deliver_up((0, 0))
    w.take(0)
    w.up[0, 0].append(w.senders[0, 0].control("reset_mm"))
    w.deliver_up((0, 0))
    assert [int(a.mm_hash) for a in w.receivers[0].directory()] == [2]
    [key] = w.running[0]
    w.finish(0, key)
    assert w.receivers[0].directory() == ()


def test_controls_are_carried_out_and_handed_on():
    w = world()
    w.up[0, 0].append(w.senders[0, 0].control("resize_ipc", 50))
    w.up[0, 0].append(w.senders[0, 0].control("reset_encoder"))
    w.settle()
    assert w.receivers[0].store.capacity_bytes == 50
    assert [c.action for c in w.receivers[0].take_controls()] == ["resize_ipc", "reset_encoder"]
    assert w.senders[0, 0].capacity_bytes == 50


def test_text_requests_never_queue():
    w = world(capacity=10)
    w.send(w.add_task(0, (1,)), 0)
    w.send(w.add_task(0, (2,)), 0)
    w.send(w.add_task(0, ()), 0)
    for _ in range(3):
        w.deliver_up((0, 0))
    w.take(0)
    assert {key[1][0] for key in w.running[0]} == {"0", "2"}
    w.settle()
    assert w.is_settled()


def test_needs_rejections_and_credit_go_out_at_once():
    w = world(max_window_bytes=20)
    receiver = w.receivers[0]
    w.send(w.add_task(0, (1,)), 0)
    w.deliver_up((0, 0))
    assert not receiver.wants_immediate_flush("f0")
    w.send(w.add_task(0, (2,)), 0)
    w.deliver_up((0, 0))
    assert receiver.wants_immediate_flush("f0")
    w.settle()
    assert not receiver.wants_immediate_flush("f0")


@pytest.mark.parametrize(
    ("hello", "reason"),
    [
        (Hello(PROTOCOL_VERSION - 1, "f1", (1, 1), NAMESPACE, ""), "version_mismatch"),
        (Hello(PROTOCOL_VERSION, "f1", (1, 1), b"another", ""), "ns_mismatch"),
        (Hello(PROTOCOL_VERSION, "f2", (1, 1), NAMESPACE, ""), "wrong_frontend_id"),
    ],
)
def test_sessions_that_cannot_be_are_refused(hello, reason):
    w = world()
    assert w.receivers[0].on_message("f1", hello) == [Bye(hello.sid, reason)]


def test_only_so_many_sessions():
    w = world(max_sessions=1)
    answer = w.receivers[0].on_message("f1", Hello(PROTOCOL_VERSION, "f1", (1, 1), NAMESPACE, ""))
    assert answer == [Bye((1, 1), "too_many_sessions")]
    again = w.receivers[0].on_message("f0", Hello(PROTOCOL_VERSION, "f0", (2, 1), NAMESPACE, ""))
    assert isinstance(again[0], Welcome), "it takes its own former place"


def test_a_gap_ends_the_session_and_nothing_is_lost():
    w = world()
    task = w.add_task(0, (1,))
    w.send(task, 0)
    w.up[0, 0].clear()
    w.send(w.add_task(0, (2,)), 0)
    w.deliver_up((0, 0))
    assert w.receivers[0].stats.session_ends == {"gap": 1}
    w.settle()
    assert w.is_settled()
    assert task.attempt == 2


def test_a_lost_message_down_is_a_gap_too():
    w = world()
    w.send(w.add_task(0, (1,)), 0)
    w.deliver_up((0, 0))
    w.flush((0, 0))
    w.down[0, 0].clear()
    w.settle()
    assert w.is_settled()
    assert w.senders[0, 0].stats.session_resets == {"gap": 1}


def test_messages_of_another_session_change_nothing():
    w = world()
    sender = w.senders[0, 0]
    note = Down((1, 99), 2)
    assert sender.on_down(note).session_over == ""
    assert sender.k == 1
    [bye] = w.receivers[0].on_message("f0", Req((1, 99), 1, ("x", 1), (), NIL))
    assert bye == Bye((1, 99), "unknown_session")
    assert "f0" in w.receivers[0].sessions


def test_an_old_hello_does_not_end_the_session():
    w = world()
    assert (
        w.receivers[0].on_message("f0", Hello(PROTOCOL_VERSION, "f0", (1, 1), NAMESPACE, "")) == []
    )
    newer = w.receivers[0].on_message("f0", Hello(PROTOCOL_VERSION, "f0", (2, 1), NAMESPACE, ""))
    assert isinstance(newer[0], Welcome)


def test_a_peer_that_ignores_its_window_is_cut_off():
    w = world(max_window_bytes=10)
    w.senders[0, 0].window_bytes = 1000
    sending = w.send(w.add_task(0, (1, 2)), 0)
    assert carried(sending) == [1, 2]
    with pytest.raises(Violation, match="over the window"):
        w.deliver_up((0, 0))
    assert w.receivers[0].stats.session_ends == {"window": 1}


def test_nothing_is_sent_without_a_session():
    sender = Sender("f0", frontend_boot=1)
    with pytest.raises(Overloaded):
        sender.request(("a", 1), [], msgspec.Raw(b"\xc0"), {})


def test_a_rejected_value_conflict_keeps_the_first_value():
    w = world(frontends=2, max_window_bytes=50)
    w.put((0, 0), (1,))
    w.put((1, 0), (1,))
    [sending] = w.up[1, 0]
    w.up[1, 0].clear()
    w.settle()
    receiver = w.receivers[0]
    message, values = w.open(sending)
    forged = {mm_hash(1): values[mm_hash(1)]._replace(data=b"x" * 10, digest=b"forged!!")}
    receiver.on_message("f1", message, forged)
    assert receiver.stats.num_value_conflicts == 1
    entry = receiver.store.lookup(mm_hash(1))
    assert bytes(entry.value.data) == value_bytes(1, 10)


def test_a_shrink_leaves_room_for_the_largest_request():
    """S is all windows when the largest request fits the cache at start. A shrink to nothing then
    left such requests no place at all: each was refused until the engine's next start."""
    w = world(largest_request_bytes=60)
    w.receivers[0].resize(0)
    w.settle()
    assert w.receivers[0].store.capacity_bytes == 60
    w.send(w.add_task(0, (1, 2, 3, 4, 5, 6)), 0)
    w.settle()
    assert w.is_settled()
    off = world(capacity=0, largest_request_bytes=60)
    assert off.receivers[0].limits.min_capacity_bytes == 0
