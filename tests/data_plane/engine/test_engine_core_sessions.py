"""Sessions that the engine's core keeps, or ends and says so."""

from foveal_runtime.engine.testing.fake_frontend import FakeFrontend, FakeItem
from foveal_runtime.mirror.sender import Sending
from foveal_runtime.plan.config import EngineCaches
from tests.support.engine_core_rig import A, Engine


def two_frontends(ipc_bytes: int) -> tuple[Engine, FakeFrontend, FakeFrontend]:
    caches = EngineCaches(ipc_bytes=ipc_bytes, ipc_staging_bytes=1 << 24, block_size=4)
    engine = Engine(caches=caches, largest_request_bytes=8000)  # windows take all of the staging
    return engine, engine.connect("f1"), engine.connect("f2")


def values(frontend: FakeFrontend, begin: int, end: int) -> Sending:
    items = [FakeItem(f"value {index}", 1) for index in range(begin, end)]
    sending = frontend.sender.put(
        [item.send_item for item in items], {item.mm_hash: item.send_value for item in items}
    )
    assert sending is not None
    assert len(sending.frames) == end - begin, "the window holds them all"
    return sending


def test_a_reset_of_many_values_ends_no_session():
    """More than 4,096 values that went at once counted as a backlog: all sessions ended."""
    engine, one, two = two_frontends(1 << 24)
    for begin in range(0, 5000, 1000):
        engine.up(one, values(one, begin, begin + 1000))
    engine.run()
    assert len(two.sender.confirmed) == 5000
    engine.up(two, two.request(("r", 0), [1, 2, 3], max_tokens=20))
    engine.step()
    engine.up(one, one.sender.control("reset_mm"))
    engine.up(two, two.request(("s", 0), [4, A, 5]))  # a change before anybody heard of the reset
    engine.run()
    assert (one.over, two.over, two.lost) == ("", "", [])
    assert two.finish == {("r", 0): "length", ("s", 0): "length"}
    assert set(one.sender.confirmed) == set(two.sender.confirmed) == {A.mm_hash}
    engine.assert_clean()


def test_a_frontend_whose_session_ends_for_a_backlog_is_told():
    """It was not: its requests were aborted, the engine's heartbeats went on, and its streams
    waited without end."""
    engine, one, two = two_frontends(100_000)
    engine.up(two, two.request(("r", 0), [1, 2, 3], max_tokens=20))
    num_sent = 0
    while engine.core.receiver.sessions:  # values come, and most of them go, during one step
        engine.up(one, values(one, num_sent, num_sent + 100))
        num_sent += 100
    assert num_sent > 2000
    engine.run()
    assert (one.over, two.over) == ("backlog", "backlog")
    assert two.lost == [("r", 0)]
    engine.up(two, two.hello())
    engine.up(two, two.request(("r", 1), [1, 2, 3]))
    engine.run()
    assert two.finish == {("r", 1): "length"}
    engine.assert_clean()


def test_nothing_is_kept_of_a_session_that_ends_with_an_answer_under_way():
    """Its last report of the load stayed, one for each such frontend that ever was."""
    engine = Engine()
    frontend = engine.connect("f1")
    engine.run()
    engine.up(frontend, frontend.request(("r", 0), []))  # an empty prompt is refused at once
    engine.core.on_session_lost("f1", frontend.sender.sid, "disconnected")
    engine.run()
    assert not engine.core.reports._told
    engine.assert_clean()
