"""Windows: the bytes of values that a session may send before it is asked for them; and what it can
never send."""

import pytest
from mirror_world import World

from foveal_runtime.mirror.receiver import ReceiverLimits
from foveal_runtime.mirror.sender import SendItem
from foveal_runtime.plan.errors import MediaTooLarge

MIB = 1 << 20
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


def test_a_value_that_no_message_carries_is_refused_before_it_is_sent():
    """The transport broke the link with every other request on it, attempt after attempt."""
    w = World(1, 1, [SIZE], ReceiverLimits(capacity_bytes=4 << 30), codec=True)
    w.settle()
    sender = w.senders[0, 0]
    sender.check_size([SendItem(b"a" * 32, 1 << 30), SendItem(b"b" * 32, 1 << 30)])
    with pytest.raises(MediaTooLarge, match=r"takes 1073741825 bytes .* at most 1073741824"):
        sender.check_size([SendItem(b"a" * 32, SIZE), SendItem(b"b" * 32, (1 << 30) + 1)])


@pytest.mark.parametrize(
    ("capacity_bytes", "grace_bytes"),
    [(64 * MIB, 8 * MIB), (1024 * MIB, 16 * MIB), (4000 * MIB, 40 * MIB)],
)
def test_a_hundredth_is_announced_as_gone_before_its_room_is_needed(capacity_bytes, grace_bytes):
    """But at least 16 MiB, of at most an eighth of the cache."""
    assert ReceiverLimits(capacity_bytes=capacity_bytes).grace_of(capacity_bytes) == grace_bytes
