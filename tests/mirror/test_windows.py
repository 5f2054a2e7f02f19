"""Windows: the bytes of values that a session may send before it is asked for them."""

from mirror_world import World

from foveal_runtime.mirror.receiver import ReceiverLimits

SIZE = 342_400
"""Bytes of an image of 576 x 576 pixels."""


def test_each_session_gets_half_of_what_is_left_and_those_without_a_window_work():
    w = World(30, 1, [SIZE, SIZE], ReceiverLimits(capacity_bytes=4 << 30), codec=True)
    w.settle()
    windows = [w.senders[f, 0].window_bytes for f in range(30)]
    assert windows[:5] == [64 << 20, 64 << 20, 64 << 20, 32 << 20, 16 << 20]
    assert [f for f, window in enumerate(windows, start=1) if window >= SIZE][-1] == 10
    assert w.send(w.add_task(9, (0,)), 0).frames, "the value goes with its request"
    assert not w.send(w.add_task(29, (1,)), 0).frames, "the engine will ask"
    w.settle()
    assert w.is_settled()
