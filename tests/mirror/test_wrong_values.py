"""Values that differ from, or no longer are, what was stored under their hash."""

from mirror_world import World, mm_hash, value_bytes

from foveal_runtime.mirror.messages import Fill, InlineValue, Req
from foveal_runtime.mirror.receiver import ReceiverLimits
from foveal_runtime.mirror.store import Value


def world() -> World:
    limits = ReceiverLimits(
        capacity_bytes=100, staging_bytes=200, grace_bytes=0, max_cacheable_bytes=100,
        max_window_bytes=50,
    )  # fmt: skip
    made = World(2, 1, [10] * 10, limits, codec=True)
    made.settle()
    return made


def differing(w: World, frontend: int, index: int) -> tuple[Req, dict]:
    """A request of a frontend that carries other bytes than those stored under its hash."""
    w.send(w.add_task(frontend, (index,)), 0)
    sending = w.up[frontend, 0].pop()
    message, values = w.open(sending)
    assert mm_hash(index) in values
    key = mm_hash(index)
    return message, {key: values[key]._replace(data=b"new" * 4, digest=b"other!!!")}


def test_a_value_that_differs_replaces_the_stored_one():
    """The first value under a hash won, for as long as it was used: a damaged one was never
    replaced, whatever frontends sent."""
    w = world()
    w.put((0, 0), (1,))
    message, newer = differing(w, 1, 1)
    w.settle()
    receiver = w.receivers[0]
    receiver.on_message("f1", message, newer)
    [ready] = receiver.take_ready()
    assert bytes(ready.items[mm_hash(1)].data) == b"new" * 4
    assert receiver.stats.num_value_conflicts == 1
    assert receiver.take_replaced() == [mm_hash(1)]
    assert receiver.take_replaced() == []
    assert [entry.mm_hash for entry in receiver.directory()] == [mm_hash(1)]
    receiver.check_integrity()


def test_who_brings_another_value_than_the_one_in_use_gets_his_own():
    """It was answered from the one in use. The engine core hears of it and stops the users."""
    w = world()
    w.send(w.add_task(0, (1,)), 0)
    message, newer = differing(w, 1, 1)
    w.deliver_up((0, 0))
    receiver = w.receivers[0]
    [first] = receiver.take_ready()
    receiver.on_message("f1", message, newer)
    assert receiver.take_ready() == []
    assert receiver.stats.num_value_conflicts == 1
    assert receiver.take_replaced() == [mm_hash(1)]
    assert receiver.take_replaced() == []
    receiver.requeue(first.fid, first.rid)
    assert receiver.take_replaced() == [mm_hash(1)], "what was made from it meanwhile"
    second, again = receiver.take_ready()
    assert (second.fid, again.rid) == ("f1", first.rid)
    for ready in (second, again):
        assert bytes(ready.items[mm_hash(1)].data) == b"new" * 4
    assert [entry.mm_hash for entry in receiver.directory()] == [mm_hash(1)]
    receiver.check_integrity()


def test_who_waits_for_other_values_with_a_wrong_one_gets_the_right_one():
    """It holds the value and does not run yet."""
    w = world()
    w.unmakeable.add(2)
    waiting = w.send(w.add_task(0, (1, 2)), 0)
    sending = w.up[0, 0].pop()
    opened, values = w.open(sending)
    message, newer = differing(w, 1, 1)
    receiver = w.receivers[0]
    receiver.on_message("f0", opened, {mm_hash(1): values[mm_hash(1)]})
    assert receiver.take_ready() == []
    assert receiver.store.pinned
    receiver.on_message("f1", message, newer)
    [second] = receiver.take_ready()
    assert bytes(second.items[mm_hash(1)].data) == b"new" * 4
    n = receiver.sessions["f0"].expected
    inline = InlineValue(1, values[mm_hash(2)].digest)
    fill = Fill(waiting.message.sid, n, mm_hash(2), 10, inline)
    receiver.on_message("f0", fill, {mm_hash(2): values[mm_hash(2)]})
    [first] = receiver.take_ready()
    assert first.items[mm_hash(1)] is second.items[mm_hash(1)]
    assert receiver.stats.num_queries == 3
    receiver.check_integrity()


def test_a_damaged_value_is_asked_for_again_once_nobody_uses_it():
    """Two requests run with a value that has changed in memory; the third is handed it, finds it
    damaged and gets another when both have ended. A fourth waits behind it."""
    w = world()
    for frontend in (0, 1):
        w.send(w.add_task(frontend, (1,)), 0)
        w.deliver_up((frontend, 0))
    w.take(0)
    receiver = w.receivers[0]
    third = w.send(w.add_task(0, (1, 2)), 0).message
    w.deliver_up((0, 0))
    [ready] = receiver.take_ready()
    receiver.refetch(ready.fid, ready.rid, [mm_hash(1)])
    assert receiver.stats.num_damaged_values == 1
    fourth = w.send(w.add_task(1, (2,)), 0)
    w.deliver_up((1, 0))
    assert receiver.take_ready() == []
    keys = list(w.running[0])
    w.finish(0, keys[0])
    assert receiver.take_ready() == []
    assert receiver.take_replaced() == []
    w.finish(0, keys[1])
    assert receiver.take_replaced() == [mm_hash(1)]
    assert receiver.flush("f0").need == (mm_hash(1),)
    receiver.check_integrity()
    [after] = receiver.take_ready()
    assert after.rid == fourth.message.rid
    value = Value(value_bytes(1, 10), None, b"%08d" % 1)
    n = receiver.sessions["f0"].expected
    inline = InlineValue(1, value.digest)
    receiver.on_message("f0", Fill(third.sid, n, mm_hash(1), 10, inline), {mm_hash(1): value})
    [healed] = receiver.take_ready()
    assert healed.rid == third.rid
    assert healed.items[mm_hash(1)] is value
    receiver.check_integrity()
