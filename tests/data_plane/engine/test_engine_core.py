"""The engine's core behind the real protocol, without sockets: frontends, mirror, scheduler."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import msgspec
import numpy as np
import pytest

from foveal_runtime.engine.events.log import EventLog
from foveal_runtime.engine.testing.fake_frontend import FakeItem
from foveal_runtime.mirror.messages import Down
from foveal_runtime.plan.config import EngineCaches, SchedulerConfig
from foveal_runtime.plan.sampling import SamplingParams
from foveal_runtime.wire import codec
from foveal_runtime.wire.item import pack_item
from foveal_runtime.wire.messages import RequestBody
from tests.support.engine_core_rig import A, B, C, Engine


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
    assert two.sender.confirmed[A.mm_hash][1].num_tokens == 6
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


def test_streams_hear_of_their_tokens_while_an_image_is_encoded():
    engine = Engine()
    engine.runner.costs = (0.01, 0.001, 0.1)
    frontend = engine.connect()
    engine.up(frontend, frontend.request(("text", 0), range(10, 14), max_tokens=40))
    for _ in range(3):
        engine.step()
    engine.up(frontend, frontend.request(("r", 0), [1, A, 3]))
    num_sent = []
    engine.runner._on_execute = lambda plan: num_sent.append(len(engine.sent))
    engine.core.step()
    assert len(num_sent) > 4
    streams, encoding, *between = num_sent
    assert (streams, encoding) == (0, 1)
    assert between == [1 + n for n in range(len(between))], "tokens leave before the next step"
    engine.deliver()
    engine.run()
    engine.check(frontend, ("text", 0))
    engine.check(frontend, ("r", 0))
    engine.assert_clean()


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


def test_a_frontend_that_says_hello_again_is_told_the_load_again():
    """It forgot the load with its session, and the engine's has not changed since."""
    engine = Engine()
    frontend = engine.connect()
    engine.run()
    frontend.load = None
    frontend.sender.end_session("restart")
    engine.up(frontend, frontend.hello())
    engine.run()
    assert frontend.load is not None


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


def test_reports_to_many_frontends_are_spread_over_time_and_the_last_one_reaches_all():
    """With 200 each hears of the load five times a second, not 20 times; of a drain at once."""
    engine = Engine()
    busy, *idle = [engine.connect(f"f{index}") for index in range(200)]
    engine.run()
    heard = {frontend: [(engine.clock.now, frontend.load.stamp)] for frontend in idle}
    began = engine.clock.now
    engine.up(busy, busy.request(("r", 0), range(10, 30), max_tokens=150))
    while engine.core.has_work:
        engine.step()
        for frontend, reports in heard.items():
            if frontend.load.stamp != reports[-1][1]:
                reports.append((engine.clock.now, frontend.load.stamp))
    times = Counter(now for reports in heard.values() for now, _ in reports[1:])
    assert max(times.values()) == 50
    assert times.total() <= 1000 * (engine.clock.now - began) + 50
    waits = [b - a for all_ in heard.values() for (a, _), (b, _) in pairwise(all_[1:])]
    assert max(waits) < 0.26
    engine.run()
    assert {frontend.load.num_running for frontend in (busy, *idle)} == {0}
    engine.core.drain()
    engine.step()
    assert all(frontend.load.draining for frontend in (busy, *idle))


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
    engine.core.close_sessions()
    engine.deliver()
    assert frontend.over == "draining"
    assert engine.core.receiver.sessions == {}


def test_a_drain_that_takes_too_long_hands_requests_over():
    engine = Engine()
    frontend = engine.connect("f1")
    engine.up(frontend, frontend.request(("r", 0), [1, 2, 3], max_tokens=50))
    engine.step()
    engine.core.drain()
    engine.core.close_sessions()
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


def test_a_request_that_waited_for_room_starts_when_another_ends():
    size = len(A.value)
    caches = EngineCaches(ipc_bytes=size, ipc_staging_bytes=8000, block_size=4)
    engine = Engine(caches=caches)
    engine.core.receiver.limits = replace(engine.core.receiver.limits, window_divisor=1)
    frontend = engine.connect()
    other = FakeItem("other", 6)
    assert len(other.value) == size
    engine.core.receiver.admission.cacheable_limit = size
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


def test_scores_of_several_prompts_go_in_several_messages(monkeypatch):
    """A frontend reads a message in one piece, for 20 ms where it has 262,144 scores; those of all
    prompts of a step came in one."""
    monkeypatch.setattr("foveal_runtime.engine.scheduler.outputs.MESSAGE_SCORES", 8)
    engine = Engine()
    frontend = engine.connect()
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=1, ignore_eos=True)
    for number in range(4):
        sending = frontend.request((f"r{number}", 0), [1, 2, 3, 4, number + 5], sampling=sampling)
        engine.up(frontend, sending)
    engine.core.step()
    sent = [m.outputs for _, m in engine.sent if isinstance(m, Down) and m.outputs]
    found = [len(codec.decode_outputs(raw).outputs) for raw in sent]
    assert [number for number in found if number] == [2, 2], "4 scores each"
    engine.deliver()
    engine.run()
    assert set(frontend.finish.values()) == {"length"}
    engine.assert_clean()
