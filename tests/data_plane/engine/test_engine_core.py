"""The engine's core behind the real protocol, without sockets: frontends, mirror, scheduler."""

import random
from collections import deque
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from foveal_runtime.engine.events.log import EventLog
from foveal_runtime.engine.process.assemble import LoadedEngine, assemble_core, scheduler_limits
from foveal_runtime.engine.testing.drive import FakeClock
from foveal_runtime.engine.testing.fake_frontend import FakeFrontend, FakeItem
from foveal_runtime.engine.testing.fake_runner import FakeRunner, reference_tokens
from foveal_runtime.mirror.messages import Down
from foveal_runtime.plan.budget.encoder import LargestItem
from foveal_runtime.plan.config import EngineCaches, EngineConfig, ModelConfig, SchedulerConfig
from foveal_runtime.plan.errors import MediaTooLarge, StartupError
from foveal_runtime.plan.sampling import SamplingParams
from foveal_runtime.wire import codec
from foveal_runtime.wire.item import pack_item
from foveal_runtime.wire.messages import RequestBody


class Engine:
    """A core, its frontends, and messages carried between them as bytes."""

    def __init__(self, *, caches=None, scheduler=None, num_blocks=64, events=None, max_len=200,
                 run_ahead="off"):  # fmt: skip
        self.clock = FakeClock()
        config = EngineConfig(
            model=ModelConfig(path="/models/fake"),
            caches=caches or EngineCaches(ipc_bytes=4000, ipc_staging_bytes=8000, block_size=4),
            scheduler=scheduler or SchedulerConfig(max_num_batched_tokens=32, max_num_seqs=8),
            run_ahead=run_ahead,
        )
        block_size = config.caches.block_size
        self.runner = FakeRunner(num_blocks=num_blocks, block_size=block_size)
        loaded = LoadedEngine(
            runner=self.runner, num_blocks=num_blocks, max_model_len=max_len,
            largest={"image": LargestItem(24, 24)},
        )  # fmt: skip
        self.sent = []
        self.going_up = deque()
        self.frontends = {}
        self.core = assemble_core(
            config, loaded, send=lambda fid, m: self.sent.append((fid, m)), clock=self.clock,
            events=events, boot=1,
        )  # fmt: skip

    def connect(self, name="f1", boot=1, **options):
        frontend = self.frontends[name] = FakeFrontend(name, boot=boot, **options)
        self.up(frontend, frontend.hello())
        return frontend

    def up(self, frontend, sending):
        """One message up, through its bytes, and all that it leads to, in order."""
        self.going_up.append((frontend, sending))
        while self.going_up or self.sent:
            if self.going_up:
                self._take_up(*self.going_up.popleft())
            else:
                self._take_down(*self.sent.pop(0))

    def _take_up(self, frontend, sending):
        frames = [memoryview(bytes(frame)) for frame in codec.encode_up(sending)]
        message = codec.decode_up(frames)
        values = codec.open_values(message, frames)
        self.core.on_message(frontend.sender.frontend_id, message, values)

    def _take_down(self, fid, message):
        frontend = self.frontends[fid]
        answers = frontend.take(codec.decode_down(codec.encode_down(message)))
        self.going_up.extend((frontend, answer) for answer in answers)

    def deliver(self):
        while self.sent:
            self._take_down(*self.sent.pop(0))
            while self.going_up:
                self._take_up(*self.going_up.popleft())

    def step(self):
        self.core.step()
        self.clock.now += 0.01
        self.deliver()
        self.core.check_integrity()

    def run(self, max_steps=1000):
        """Until nothing happens any more and all notes are out."""
        for _ in range(max_steps):
            if not self.core.has_work and self.core.seconds_to_note() is None:
                return
            if not self.core.has_work:
                self.clock.now += self.core.seconds_to_note()
            self.step()
        raise AssertionError("the engine does not come to rest")

    def check(self, frontend, rid):
        tokens, inputs, values = frontend.expanded(rid)
        made = frontend.tokens[rid]
        sampling = frontend.bodies[rid][2]
        assert made == reference_tokens(tokens, inputs, values, sampling, len(made)), rid

    def assert_clean(self):
        core = self.core
        assert core.num_unfinished == 0
        assert core.scheduler.pool.num_used_blocks == 0
        assert core.scheduler.encoder.num_used_embeds == 0
        assert core.receiver.store.held_bytes == 0
        assert core.receiver.store.bypass_bytes == 0
        core.check_integrity()


A, B, C = (FakeItem(name, tokens) for name, tokens in (("A", 6), ("B", 9), ("C", 12)))


def test_a_request_goes_through_and_a_repeat_costs_a_key():
    engine = Engine()
    frontend = engine.connect()
    engine.up(frontend, frontend.request(("r", 0), [1, 2, A, 3]))
    engine.run()
    assert frontend.finish == {("r", 0): "length"}
    engine.check(frontend, ("r", 0))
    first = frontend.first["r", 0]
    assert (first.num_prompt_tokens, first.num_mm_items, first.num_mm_hits) == (9, 1, 0)
    sending = frontend.request(("s", 0), [1, 2, A, 4])
    assert sending.frames == [], "the value is there: only its key travels"
    engine.up(frontend, sending)
    engine.run()
    first = frontend.first["s", 0]
    assert (first.num_cached_tokens, first.num_mm_hits, first.num_encoder_hits) == (8, 1, 0)
    assert engine.runner.num_encoded == 1
    engine.check(frontend, ("s", 0))
    engine.assert_clean()


def test_a_second_frontend_uses_what_the_first_one_sent():
    engine = Engine()
    one = engine.connect("f1")
    two = engine.connect("f2")
    engine.up(one, one.request(("r", 0), [1, A, 3]))
    engine.run()
    assert two.sender.believes(A.mm_hash)
    assert two.sender.known_meta(A.mm_hash).num_tokens == 6
    sending = two.request(("r", 0), [5, A, 3])
    assert sending.frames == []
    engine.up(two, sending)
    engine.run()
    assert two.first["r", 0].num_encoder_hits == 1
    engine.check(two, ("r", 0))
    engine.assert_clean()


def test_a_missing_value_is_asked_for_before_the_step_of_others():
    engine = Engine()
    frontend = engine.connect()
    engine.up(frontend, frontend.request(("text", 0), range(10, 40), max_tokens=20))
    engine.up(frontend, frontend.request(("r", 0), [1, A, 3], with_values=False))
    seen = []
    engine.runner._on_execute = lambda plan: seen.append(
        [m for _, m in engine.sent if isinstance(m, Down) and m.note and m.note.need]
    )
    engine.step()
    assert seen[0], "the question left before the step began"
    engine.run()
    assert frontend.num_needs == 1
    engine.check(frontend, ("r", 0))
    engine.check(frontend, ("text", 0))


def test_values_larger_than_the_cache_are_served_and_not_kept():
    engine = Engine(caches=EngineCaches(ipc_bytes=0, ipc_staging_bytes=8000, block_size=4))
    frontend = engine.connect()
    for attempt in range(2):
        engine.up(frontend, frontend.request((f"r{attempt}", 0), [1, A, B, 3]))
        engine.run()
        engine.check(frontend, (f"r{attempt}", 0))
    assert not frontend.sender.believes(A.mm_hash)
    # Prefix and encoder caches are on although the value cache is off.
    assert frontend.first["r1", 0].num_cached_tokens == 16
    assert engine.runner.num_encoded == 2
    engine.assert_clean()


def test_too_long_after_expansion_is_refused_by_name():
    engine = Engine(max_len=20)
    frontend = engine.connect()
    engine.up(frontend, frontend.request(("r", 0), [1, B, C, 3]))
    engine.run()
    code, message = frontend.errors["r", 0]
    assert code == "context_length_exceeded"
    assert "23 tokens" in message
    assert frontend.finish["r", 0] == "error"
    engine.assert_clean()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"token_ids": b"\x01\x00\x00\x7f", "wide": False}, "outside the vocabulary"),
        ({"placements": ((5, 0),)}, "placement"),
        ({"sampling": SamplingParams(max_tokens=0)}, "max_tokens"),
        ({"token_ids": b""}, "empty"),
    ],
)
def test_a_bad_body_fails_only_its_request(change, text):
    engine = Engine()
    frontend = engine.connect()
    good = RequestBody(
        token_ids=codec.pack_tokens([1, 2, 3])[0], wide=False, placements=(),
        sampling=SamplingParams(max_tokens=2, ignore_eos=True),
    )  # fmt: skip
    bad = msgspec.structs.replace(good, **change)
    engine.up(frontend, frontend.request(("good", 0), [1, 2, 3], max_tokens=2))
    engine.core.on_message(
        "f1", frontend.sender.request(("bad", 0), [], codec.encode_body(bad), {}).message
    )
    frontend.tokens["bad", 0] = []
    engine.run()
    assert frontend.errors["bad", 0][0] == "invalid_request_error"
    assert text in frontend.errors["bad", 0][1]
    assert frontend.finish["good", 0] == "length"
    engine.assert_clean()


def test_an_item_that_expands_to_impossible_ids_fails_only_its_request():
    """An injector chooses an item's ids; one outside the vocabulary ended the whole step. Where
    encoder outputs stand, any id will do."""
    engine = Engine()
    frontend = engine.connect()
    size = engine.runner.traits.vocab_size
    pixels = {"pixels": ("uint8", np.zeros(4, np.uint8))}
    for name, ids, runs in (("bad", (1, size), ((0, 1),)), ("fine", (1, size), ((1, 1),))):
        item = FakeItem(name, 2)
        item.value = pack_item(0, ids, runs, pixels)
        engine.up(frontend, frontend.request((name, 0), [1, item, 3], max_tokens=2))
    engine.run()
    assert frontend.errors["bad", 0][0] == "invalid_request_error"
    assert "outside the vocabulary" in frontend.errors["bad", 0][1]
    assert frontend.finish["fine", 0] == "length"
    engine.assert_clean()


def test_an_abort_stops_the_request_and_frees_all():
    engine = Engine()
    frontend = engine.connect()
    engine.up(frontend, frontend.request(("r", 0), [1, A, 3], max_tokens=50))
    engine.step()
    engine.up(frontend, frontend.sender.abort(("r", 0)))
    engine.run()
    assert 0 < len(frontend.tokens["r", 0]) < 5
    assert ("r", 0) not in frontend.finish
    engine.assert_clean()


def test_a_lost_session_ends_its_requests_and_the_next_attempt_goes_on():
    engine = Engine()
    frontend = engine.connect()
    engine.up(frontend, frontend.request(("r", 0), [1, A, 3], max_tokens=12))
    for _ in range(4):
        engine.step()
    emitted = frontend.tokens["r", 0]
    assert emitted
    sid = frontend.sender.sid
    assert frontend.sender.end_session("test") == [("r", 0)]
    engine.core.on_session_lost("f1", sid, "test")
    engine.run()
    engine.assert_clean()
    engine.up(frontend, frontend.hello())
    engine.core.on_session_lost("f1", sid, "late news of the old one")
    engine.up(frontend, frontend.request(("r", 1), [1, A, 3], max_tokens=12, emitted=list(emitted)))
    engine.run()
    assert frontend.tokens["r", 1][: len(emitted)] == emitted
    assert len(frontend.tokens["r", 1]) == 12
    engine.check(frontend, ("r", 1))
    assert frontend.first["r", 1].num_prompt_tokens == 8
    engine.assert_clean()


def test_a_new_hello_ends_the_old_session():
    engine = Engine()
    frontend = engine.connect()
    engine.up(frontend, frontend.request(("r", 0), [1, 2, 3], max_tokens=50))
    engine.step()
    frontend.sender.end_session("restart")
    engine.up(frontend, frontend.hello())
    engine.run()
    assert len(frontend.tokens["r", 0]) < 5
    engine.assert_clean()


def test_another_namespace_is_refused():
    engine = Engine()
    frontend = engine.connect(namespace=b"other processor!")
    assert frontend.over == "ns_mismatch"


def test_load_is_reported_with_outputs_and_to_idle_frontends_when_it_changed():
    engine = Engine()
    busy, idle = engine.connect("f1"), engine.connect("f2")
    engine.up(busy, busy.request(("r", 0), range(10, 30), max_tokens=20))
    for _ in range(10):
        engine.step()
    assert (busy.load.num_running, busy.load.num_waiting) == (1, 0)
    assert idle.load.num_running == 1
    assert busy.load.kv_usage > 0
    engine.run()
    assert (idle.load.num_running, idle.load.kv_usage) == (0, 0.0)
    assert not idle.load.draining


def test_draining_finishes_what_is_here_and_takes_no_new_session():
    engine = Engine()
    frontend = engine.connect("f1")
    engine.up(frontend, frontend.request(("r", 0), [1, 2, 3], max_tokens=20))
    engine.step()
    engine.core.drain()
    engine.step()
    assert frontend.load.draining
    late = engine.connect("f2")
    engine.deliver()
    assert late.over == "draining"
    engine.run()
    assert frontend.finish["r", 0] == "length"
    engine.core.close_sessions("draining")
    engine.deliver()
    assert frontend.over == "draining"
    assert engine.core.receiver.sessions == {}


def test_a_drain_that_takes_too_long_hands_requests_over():
    engine = Engine()
    frontend = engine.connect("f1")
    engine.up(frontend, frontend.request(("r", 0), [1, 2, 3], max_tokens=50))
    engine.step()
    engine.core.drain()
    engine.core.close_sessions("draining")
    engine.deliver()
    assert frontend.lost == [("r", 0)]
    engine.run()
    engine.assert_clean()


def test_control_messages_reset_the_caches():
    engine = Engine()
    frontend = engine.connect()
    engine.up(frontend, frontend.request(("r", 0), [1, A, 3, 4, 5]))
    engine.run()
    for action in ("reset_mm", "reset_encoder", "reset_prefix", "nonsense"):
        engine.up(frontend, frontend.sender.control(action))
    engine.run()
    assert not frontend.sender.believes(A.mm_hash)
    engine.up(frontend, frontend.request(("s", 0), [1, A, 3, 4, 5]))
    engine.run()
    first = frontend.first["s", 0]
    assert (first.num_cached_tokens, first.num_mm_hits, first.num_encoder_hits) == (0, 0, 0)
    assert engine.runner.num_encoded == 2
    engine.check(frontend, ("s", 0))


def test_events_tell_the_truth_about_all_three_caches():
    batches = []
    log = EventLog("e0", batches.append, wall_clock=lambda: 5.0)
    engine = Engine(events=log)
    frontend = engine.connect()
    prompts = [[1, 2, A, 3], [1, 2, B, 3], [1, 2, A, 4], [7, 8, C, B, 1, 2, 3, 4]]
    for number, prompt in enumerate(prompts):
        engine.up(frontend, frontend.request((f"r{number}", 0), prompt))
        engine.run()
    for action in ("reset_mm", "reset_encoder", "reset_prefix"):
        engine.up(frontend, frontend.sender.control(action))
    engine.up(frontend, frontend.request(("last", 0), [1, 2, A, 3]))
    engine.run()
    values, encoder, blocks = set(), set(), {}
    for batch in batches:
        for event in batch.events:
            kind = type(event).__name__
            if kind == "ValueStored":
                values.add(event.mm_hash)
                assert event.num_tokens > 0
            elif kind == "ValueRemoved":
                values -= set(event.mm_hashes)
            elif kind == "EncoderStored":
                encoder |= set(event.mm_hashes)
            elif kind == "EncoderRemoved":
                encoder -= set(event.mm_hashes)
            elif kind == "BlockStored":
                blocks[event.block_hash] = event
            elif kind == "BlocksRemoved":
                for block_hash in event.block_hashes:
                    del blocks[block_hash]
    assert values == set(engine.core.receiver.store.announced())
    assert encoder == set(engine.runner.device)
    assert blocks.keys() == engine.core.scheduler.pool._by_hash.keys()
    stored = list(blocks.values())
    assert stored[0].token_ids == [1, 2, 7, 7]
    assert stored[0].extra == ((A.mm_hash, 2),)
    assert stored[1].parent == stored[0].block_hash
    assert stored[1].extra == ((A.mm_hash, -2),)


def test_limits_come_from_the_configuration():
    runner = FakeRunner(num_blocks=100, block_size=16)
    loaded = LoadedEngine(
        runner=runner, num_blocks=100, max_model_len=10_000,
        largest={"image": LargestItem(3000, 2900)},
    )  # fmt: skip
    config = EngineConfig(model=ModelConfig(path="/m"))
    limits = scheduler_limits(config, loaded)
    assert (limits.encoder_compute_embeds, limits.encoder_cache_embeds) == (2900, 2900)
    assert limits.max_model_len == 1584, "no request may outgrow the KV cache"
    assert limits.max_num_mixed_tokens == 256
    half = msgspec.structs.replace(runner.traits, value_bytes=2)
    loaded = replace(loaded, runner=FakeRunner(num_blocks=100, block_size=16, traits=half))
    assert scheduler_limits(config, loaded).max_num_mixed_tokens == 512, "a step takes half as long"
    config = msgspec.structs.replace(
        config, scheduler=SchedulerConfig(disable_chunked_mm_input=True)
    )
    with pytest.raises(StartupError, match=r"3000.*2048"):
        scheduler_limits(config, loaded)


def test_too_many_waiting_requests_are_told_to_come_later():
    engine = Engine(
        scheduler=SchedulerConfig(max_num_batched_tokens=32, max_num_seqs=1, max_waiting=2)
    )
    frontend = engine.connect()
    for number in range(4):
        engine.up(frontend, frontend.request((f"r{number}", 0), [1, 2, 3]))
    engine.run()
    codes = [frontend.errors.get((f"r{n}", 0), ("",))[0] for n in range(4)]
    assert codes == ["", "", "overloaded", "overloaded"]
    engine.assert_clean()


@pytest.mark.parametrize("run_ahead", ["off", "on"])
@pytest.mark.parametrize("seed", range(6))
def test_a_crowd_of_frontends_with_small_caches(seed, run_ahead):
    """Three frontends, more media than any cache holds, aborts and lost sessions."""
    print("seed", seed)
    rng = random.Random(seed)
    caches = EngineCaches(
        ipc_bytes=rng.choice([0, 700, 2000]), ipc_staging_bytes=rng.choice([3000, 8000]),
        block_size=4, encoder_embeds=24, encoder_host_bytes=rng.choice([0, 2000]),
    )  # fmt: skip
    engine = Engine(caches=caches, num_blocks=50, run_ahead=run_ahead)
    items = [FakeItem(f"i{n}", 2 + 2 * n, 64 + 40 * n) for n in range(8)]
    names = ["f1", "f2", "f3"]
    for name in names:
        engine.connect(name)
    live, done = [], []
    for number in range(60):
        frontend = engine.frontends[rng.choice(names)]
        rid = (f"r{number}", 0)
        prompt = rng.choices([10, 11, *items], k=rng.randint(1, 4))
        try:
            sending = frontend.request(rid, [5, *prompt], max_tokens=rng.randint(1, 20))
        except MediaTooLarge:
            continue
        engine.up(frontend, sending)
        live.append((frontend, rid))
        for _ in range(rng.randint(0, 3)):
            engine.step()
        if rng.random() < 0.1:
            frontend, rid = live.pop(rng.randrange(len(live)))
            sending = frontend.sender.abort(rid)
            if sending is not None:
                engine.up(frontend, sending)
        if rng.random() < 0.05:
            frontend = engine.frontends[rng.choice(names)]
            sid = frontend.sender.sid
            lost = frontend.sender.end_session("test")
            engine.core.on_session_lost(frontend.sender.frontend_id, sid, "test")
            live = [entry for entry in live if entry[0] is not frontend or entry[1] not in lost]
            engine.up(frontend, frontend.hello())
    engine.run()
    done = [(f, rid) for f, rid in live if f.finish.get(rid) == "length"]
    assert len(done) > 20
    for frontend, rid in done:
        engine.check(frontend, rid)
    for frontend, rid in live:
        assert rid in frontend.finish, f"{rid} was dropped silently: {frontend.over}"
    engine.assert_clean()


def test_a_request_that_waited_for_room_starts_when_another_ends():
    size = len(A.value)
    caches = EngineCaches(ipc_bytes=size, ipc_staging_bytes=8000, block_size=4)
    engine = Engine(caches=caches)
    frontend = engine.connect()
    other = FakeItem("other", 6)
    assert len(other.value) == size
    engine.core.receiver.admission.max_cacheable_bytes = size
    engine.up(frontend, frontend.request(("r", 0), [1, A, 3]))
    engine.up(frontend, frontend.request(("s", 0), [1, other, 3]))
    assert engine.core.scheduler.num_requests == 1, "its value has no room while A's is in use"
    while ("r", 0) not in frontend.finish:
        engine.core.step()
        engine.deliver()
    assert engine.core.has_work
    engine.run()
    engine.check(frontend, ("s", 0))
    engine.assert_clean()


def early_release(ipc_bytes: int = 4000, num_blocks: int = 64, run_ahead: str = "off") -> Engine:
    caches = EngineCaches(
        ipc_bytes=ipc_bytes, ipc_staging_bytes=8000, block_size=4, prefix_caching=False,
        encoder_embeds=24, unpin_at="encoded",
    )  # fmt: skip
    return Engine(caches=caches, num_blocks=num_blocks, run_ahead=run_ahead)


def test_values_are_unpinned_once_their_items_are_encoded():
    engine = early_release()
    frontend = engine.connect()
    engine.up(frontend, frontend.request(("r", 0), [1, A, 2, B, 3], max_tokens=20))
    assert engine.core.receiver.store.pinned_bytes == len(A.value) + len(B.value)
    engine.step()
    assert engine.core.num_unfinished == 1
    assert engine.core.receiver.store.pinned_bytes == 0
    [request] = engine.core.scheduler.running
    assert request.values == (b"", b""), "no view keeps the memory"
    engine.run()
    assert frontend.finish["r", 0] == "length"
    engine.check(frontend, ("r", 0))
    engine.assert_clean()


def test_an_item_that_is_not_encoded_yet_keeps_its_value():
    engine = early_release()
    frontend = engine.connect()
    # 32 tokens a step: the second item is out of the first step's reach.
    engine.up(frontend, frontend.request(("r", 0), [A, *range(20, 50), B], max_tokens=8))
    engine.step()
    assert engine.core.receiver.store.pinned_bytes == len(B.value)
    engine.run()
    engine.check(frontend, ("r", 0))
    engine.assert_clean()


def test_a_preempted_request_gets_its_released_values_back():
    """Two requests that do not fit side by side once they have grown; the value cache holds one
    request's values, so those of the preempted one are gone and must be sent again."""
    ipc_bytes = len(A.value) + len(B.value) + len(C.value)
    engine = early_release(ipc_bytes, num_blocks=17)
    frontend = engine.connect()
    engine.up(frontend, frontend.request(("r", 0), [1, A, B, 3], max_tokens=30))
    engine.up(frontend, frontend.request(("s", 0), [2, C, 4], max_tokens=30))
    engine.step()
    fresh = [FakeItem(f"other{i}", 4) for i in range(3)]
    for number, item in enumerate(fresh):  # takes the room of all that is not pinned
        engine.up(frontend, frontend.request((f"t{number}", 0), [5, item], max_tokens=1))
    engine.run()
    assert engine.core.stats.num_preemptions > 0
    assert frontend.num_needs > 0
    for rid in frontend.bodies:
        assert frontend.finish[rid] == "length"
        engine.check(frontend, rid)
    queries = engine.core.receiver.stats.num_queries
    assert queries == 6, "who comes back for a value is no second query"
    engine.assert_clean()


def test_who_waits_for_released_values_can_be_aborted():
    engine = early_release(num_blocks=17)
    frontend = engine.connect()
    engine.up(frontend, frontend.request(("r", 0), [1, A, 3], max_tokens=40))
    engine.up(frontend, frontend.request(("s", 0), [2, C, 4], max_tokens=40))
    engine.step()
    engine.core.receiver.reset()  # nobody pins a value: all are gone
    frontend.answers = False
    while not engine.core.scheduler.roster.away:
        engine.step()
    [away] = engine.core.scheduler.roster.away.values()
    engine.up(frontend, frontend.sender.abort(away.rid))
    engine.run()
    [other] = {("r", 0), ("s", 0)} - {away.rid}
    assert frontend.finish == {other: "length"}
    engine.check(frontend, other)
    # The answer that never came keeps its room until the session ends.
    engine.core.end_session("f1", "over")
    engine.run()
    engine.assert_clean()


def test_released_values_that_nobody_has_any_more_end_their_request():
    engine = early_release(num_blocks=17)
    frontend = engine.connect()
    engine.up(frontend, frontend.request(("r", 0), [1, A, 3], max_tokens=40))
    engine.up(frontend, frontend.request(("s", 0), [2, C, 4], max_tokens=40))
    engine.step()
    engine.core.receiver.reset()
    frontend.items.clear()  # as for media that came by uuid alone
    engine.run()
    assert sorted(frontend.finish.values()) == ["length", "rejected"]
    [(rid, error)] = frontend.errors.items()
    assert error[0] == "mm_source_lost"
    [other] = frontend.bodies.keys() - {rid}
    engine.check(frontend, other)
    engine.assert_clean()


@pytest.mark.parametrize("run_ahead", ["off", "on"])
@pytest.mark.parametrize("seed", range(4))
def test_a_crowd_with_early_release(seed, run_ahead):
    """Tokens stay those of a straight computation, whatever is released, preempted and fetched."""
    print("seed", seed)
    rng = random.Random(seed)
    engine = early_release(ipc_bytes=900, num_blocks=33, run_ahead=run_ahead)
    frontends = [engine.connect(f"f{i}") for i in range(2)]
    items = [FakeItem(f"i{i}", rng.randrange(2, 13), rng.randrange(16, 200)) for i in range(9)]
    rids = []
    for number in range(60):
        frontend = rng.choice(frontends)
        parts = [rng.randrange(20, 60) for _ in range(rng.randrange(1, 12))]
        for item in rng.sample(items, rng.randrange(4)):
            parts.insert(rng.randrange(len(parts) + 1), item)
        rid = (f"r{number}", 0)
        engine.up(frontend, frontend.request(rid, parts, max_tokens=rng.randrange(1, 40)))
        rids.append((frontend, rid))
        for _ in range(rng.randrange(4)):
            engine.step()
        if rng.random() < 0.1:
            engine.core.receiver.reset()
    engine.run(5000)
    assert engine.core.stats.num_preemptions > 0
    for frontend, rid in rids:
        assert frontend.finish[rid] == "length", frontend.errors.get(rid)
        engine.check(frontend, rid)
    engine.assert_clean()
