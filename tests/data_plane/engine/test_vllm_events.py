"""The event stream in vLLM's schema, read by a reader that was written from that schema."""

import msgspec
import pytest
import zmq

from foveal_runtime.engine.events.stream import END_OF_REPLAY, EventStream
from foveal_runtime.engine.events.vllm import VllmEventBatch, VllmEventLog
from foveal_runtime.main.engine import event_stream
from foveal_runtime.plan.config import CurveKeys, EngineConfig, ModelConfig
from foveal_runtime.plan.errors import StartupError
from foveal_runtime.plan.sampling import SamplingParams
from foveal_runtime.wire.codec import pack_tokens
from foveal_runtime.wire.messages import RequestBody
from tests.support.engine_core_rig import A, B, C, Engine
from tests.support.vllm_event_reader import VllmEventReader


def shortened(hashes):
    return {int.from_bytes(one[-8:], "big") for one in hashes}


class Rig:
    """An engine whose batches a reader has read as bytes."""

    def __init__(self, **options):
        self.reader, self.payloads = VllmEventReader(), []
        log = VllmEventLog("e0", self._take, wall_clock=lambda: float(len(self.payloads)))
        self.engine = Engine(events=log, **options)
        self.frontend = self.engine.connect()
        self.pool = self.engine.core.scheduler.pool

    def _take(self, batch):
        self.payloads.append(msgspec.msgpack.encode(batch))
        self.reader.read(self.payloads[-1])

    def ask(self, name, prompt, **options):
        self.engine.up(self.frontend, self.frontend.request((name, 0), prompt, **options))
        self.engine.run()


def test_a_router_knows_exactly_the_blocks_that_are_there():
    """Through stores, evictions from a small pool and a reset."""
    rig = Rig(num_blocks=12)
    prompts = [[1, 2, A, 3], [1, 2, B, 3], [1, 2, A, 4], [7, 8, C, B, 1, 2, 3, 4], [1, 2, A, 3],
               list(range(20)), [*range(12), 5, 5, 5, 5]]  # fmt: skip
    for number, prompt in enumerate(prompts):
        rig.ask(f"r{number}", prompt)
        assert rig.reader.blocks.keys() == shortened(rig.pool._by_hash)
    assert any(b"BlockRemoved" in payload for payload in rig.payloads), "the pool was too large"
    assert rig.reader.num_cleared == 1, "once, at the start: what was known before is void"
    rig.engine.up(rig.frontend, rig.frontend.sender.control("reset_prefix"))
    rig.ask("last", [1, 2, A, 3])
    assert rig.reader.blocks.keys() == shortened(rig.pool._by_hash)
    assert rig.reader.num_cleared == 1


def test_extra_keys_name_the_image_and_where_it_starts():
    rig = Rig()
    rig.ask("r", [1, 2, A, 3])
    first, second, *_ = rig.reader.blocks.values()
    assert (first.parent, first.tokens) == (None, (1, 2, 7, 7))
    assert first.extra == ((A.mm_hash.hex(), 2),)
    assert second.extra == ((A.mm_hash.hex(), -2),)
    rig.ask("s", [1, 2, B, 3])
    same = [b for b in rig.reader.blocks.values() if b.tokens == first.tokens]
    assert len(same) == 2, "equal placeholders, another image: another block"


def test_tenants_with_a_salt_share_no_first_block():
    rig = Rig()
    found = []
    for name, salt in (("r", b""), ("s", b"one"), ("t", b"two")):
        body = RequestBody(
            token_ids=pack_tokens(list(range(1, 9)))[0], wide=False, placements=(),
            sampling=SamplingParams(max_tokens=1, ignore_eos=True), cache_salt=salt,
        )  # fmt: skip
        rig.ask(name, list(range(1, 9)), body=body)
        found.append([one.extra for one in rig.reader.blocks.values() if one.parent is None][-1])
    assert found == [(), (b"one".hex(),), (b"two".hex(),)]


def test_blocks_that_follow_each_other_are_one_event():
    rig = Rig()
    rig.ask("r", list(range(1, 18)))
    batches = [msgspec.msgpack.decode(payload) for payload in rig.payloads]
    stored = [event for _, events, _ in batches for event in events if event[0] == "BlockStored"]
    assert len(stored[0][1]) == 4, "the prompt's"
    assert stored[0][8] == [None] * 4
    assert stored[1][2] == stored[0][1][-1], "what was generated follows in a later step"


@pytest.fixture
def stream():
    made = EventStream("tcp://127.0.0.1:0", topic=b"kv@pod@m", first=0)
    made.start()
    yield made
    made.close()


def test_frames_and_replay_are_those_of_vllms_publisher(stream):
    """Numbers begin at 0, a REQ socket asks with a number and gets (number, payload) pairs up to
    (-1, nothing)."""
    for number in range(3):
        stream.publish(VllmEventBatch(float(number), []))
    context = zmq.Context()
    with context.socket(zmq.SUB) as sub, context.socket(zmq.DEALER) as dealer:
        for socket, endpoint in ((sub, stream.endpoint), (dealer, stream.replay)):
            socket.setsockopt(zmq.RCVTIMEO, 10_000)
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(endpoint)
        sub.setsockopt(zmq.SUBSCRIBE, b"kv@")
        dealer.send_multipart([b"", (1).to_bytes(8, "big")])
        found = []
        while True:
            empty, number, payload = dealer.recv_multipart()
            assert empty == b"", "the delimiter that a REQ socket takes off"
            if number == END_OF_REPLAY:
                assert int.from_bytes(number, "big", signed=True) == -1
                assert payload == b""
                break
            found.append((int.from_bytes(number, "big"), msgspec.msgpack.decode(payload)[0]))
        assert found == [(1, 1.0), (2, 2.0)]
        last = 2
        while not sub.poll(20):  # until the subscription has reached the other side
            last += 1
            stream.publish(VllmEventBatch(float(last), []))
        topic, number, payload = sub.recv_multipart()
        assert topic == b"kv@pod@m"
        assert int.from_bytes(number, "big") == msgspec.msgpack.decode(payload)[0]
    context.term()


def test_the_schema_is_chosen_by_the_configuration():
    def config(**options):
        return EngineConfig(model=ModelConfig(path="/m"), events_bind="tcp://*:5557", **options)

    stream, log = event_stream(config(events_format="vllm", events_topic="kv@a@b"))
    assert isinstance(log, VllmEventLog)
    with pytest.raises(StartupError, match="not on loopback"):
        stream.start()
    stream, log = event_stream(config())
    assert not isinstance(log, VllmEventLog)
    assert event_stream(EngineConfig(model=ModelConfig(path="/m"))) == (None, None)


def test_a_plain_stream_ignores_the_keys_of_its_engine(tmp_path):
    """A pod's engine always has keys. Its stream used to demand them of routers that know none."""
    names = ("server_public_file", "server_secret_file", "client_public_file")
    curve = CurveKeys(**{name: str(tmp_path / "not-read") for name in names})
    plain = EngineConfig(model=ModelConfig(path="/m"), events_bind="tcp://127.0.0.1:0", curve=curve,
                         events_format="vllm", events_plain=True)  # fmt: skip
    stream, _ = event_stream(plain)
    stream.start()
    stream.publish(VllmEventBatch(1.0, []))
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.RCVTIMEO, 10_000)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(stream.replay)
        dealer.send_multipart([b"", bytes(8)])
        assert msgspec.msgpack.decode(dealer.recv_multipart()[2]) == [1.0, [], 0]
    stream.close()
    stream, _ = event_stream(msgspec.structs.replace(plain, events_plain=False))
    with pytest.raises(StartupError):
        stream.start()


def test_states_have_no_event_and_are_not_kept() -> None:
    published: list[object] = []
    log = VllmEventLog("e", published.append)
    log.flush()
    log.state_stored(b"x" * 32)
    log.state_removed(b"x" * 32)
    log.flush()
    assert len(published) == 1, "caches that were cleared at the start"
    assert (log._events, log._removed_states) == ([], [])
