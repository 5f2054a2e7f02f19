"""The event stream on real sockets: numbers, replay, bounds."""

import msgspec
import pytest
import zmq

from foveal_runtime.engine.events import stream as event_stream
from foveal_runtime.engine.events.log import BlocksCleared, EncoderStored, EventBatch
from foveal_runtime.engine.events.stream import (
    END_OF_REPLAY,
    MAX_REQUEST_BYTES,
    TOPIC,
    EventStream,
    replay_endpoint,
)
from foveal_runtime.plan.errors import StartupError


def batch(number):
    return EventBatch("e0", 7, float(number), [EncoderStored([b"k" * 32], "device")])


@pytest.fixture
def stream():
    made = EventStream("tcp://127.0.0.1:0")
    made.start()
    yield made
    made.close()


@pytest.fixture
def sockets():
    context, made = zmq.Context(), []

    def connect_(kind, endpoint):
        made.append(connect(context, kind, endpoint))
        return made[-1]

    yield connect_
    for socket in made:
        socket.close(0)
    context.term()


def connect(context, kind, endpoint):
    socket = context.socket(kind)
    socket.setsockopt(zmq.RCVTIMEO, 10_000)
    if kind == zmq.SUB:
        socket.setsockopt(zmq.SUBSCRIBE, TOPIC)
    socket.connect(endpoint)
    return socket


def replay(socket, first):
    socket.send(first.to_bytes(8, "big"))
    numbers = []
    while True:
        number, payload = socket.recv_multipart()
        if number == END_OF_REPLAY:
            return numbers
        numbers.append(int.from_bytes(number, "big"))
        assert msgspec.msgpack.decode(payload, type=EventBatch).boot == 7


def test_it_listens_on_ipv6_as_pods_may(sockets):
    stream = EventStream("tcp://[::1]:0", plain=True)
    stream.start()
    try:
        assert stream.endpoint.startswith("tcp://[::1]:")
    finally:
        stream.close()


def test_a_reader_s_large_frame_is_not_taken(stream, sockets):
    """It would be buffered whole before anything looks at it."""
    dealer = sockets(zmq.DEALER, stream.replay)
    stream.publish(batch(1))
    with dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED) as monitor:
        dealer.send(bytes(MAX_REQUEST_BYTES + 1))  # ends the connection; ZeroMQ makes it again
        assert monitor.poll(120_000)
        dealer.disable_monitor()
    assert replay(dealer, 0) == [1]


def test_batches_arrive_numbered_and_can_be_replayed(stream, sockets):
    sub = sockets(zmq.SUB, stream.endpoint)
    dealer = sockets(zmq.DEALER, stream.replay)
    for number in range(1, 4):
        stream.publish(batch(number))
    assert replay(dealer, 0) == [1, 2, 3], "nothing is lost before the subscription"
    assert replay(dealer, 3) == [3]
    assert replay(dealer, 9) == []
    last = 3
    while not sub.poll(20):  # until the subscription has reached the other side
        last += 1
        stream.publish(batch(last))
    topic, number, payload = sub.recv_multipart()
    assert topic == TOPIC
    assert 1 <= int.from_bytes(number, "big") <= last  # the socket may have been quicker than us
    decoded = msgspec.msgpack.decode(payload)
    assert decoded["seconds"] == int.from_bytes(number, "big"), "the batch of this number"
    assert decoded["engine_id"] == "e0"
    assert decoded["events"] == [
        {"type": "encoder_stored", "mm_hashes": [b"k" * 32], "tier": "device"}
    ]
    dealer.send(b"nonsense that is no number")
    assert replay(dealer, last) == [last]


def test_the_replay_buffer_is_bounded(stream):
    for number in range(3):
        stream._keep(number.to_bytes(8, "big"), bytes(event_stream.MAX_REPLAY_BYTES // 2 - 200))
    assert [int.from_bytes(entry[0], "big") for entry in stream._kept] == [1, 2]


def test_what_cannot_be_queued_leaves_a_gap():
    stream = EventStream("tcp://127.0.0.1:0")  # its thread never runs
    one = EventBatch("e0", 7, 1.0, [BlocksCleared()])
    each = len(msgspec.msgpack.encode(one)) + event_stream.MESSAGE_BYTES
    fit = event_stream.MAX_PENDING_BYTES // each
    for _ in range(fit + 5):
        stream.publish(one)
    assert stream.num_dropped == 5
    assert int.from_bytes(stream._pending[-1][0], "big") == fit
    stream.close()


def test_a_batch_beyond_the_bound_is_taken_alone(monkeypatch):
    """It was dropped for ever, however idle the stream was."""
    monkeypatch.setattr(event_stream, "MAX_PENDING_BYTES", 100)
    stream = EventStream("tcp://127.0.0.1:0")  # its thread never runs
    for number in (1, 2):
        stream.publish(batch(number))
    assert (len(stream._pending), stream.num_dropped) == (1, 1)
    stream.close()


def test_addresses():
    assert replay_endpoint("tcp://127.0.0.1:5590") == "tcp://127.0.0.1:5591"
    assert replay_endpoint("tcp://[::1]:5590") == "tcp://[::1]:5591"
    with pytest.raises(StartupError, match="names no port"):
        replay_endpoint("tcp://127.0.0.1")
    with pytest.raises(StartupError, match="not on loopback"):
        EventStream("tcp://0.0.0.0:5590").start()
