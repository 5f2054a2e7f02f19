"""Scheduling of media items: encoder budget, groups that are not cut, failed encodings."""

import msgspec
import pytest

from foveal_runtime.engine.testing.drive import Drive, image
from foveal_runtime.engine.testing.fake_runner import FAKE_TRAITS, content
from foveal_runtime.engine.types.step import ModelTraits
from foveal_runtime.plan.errors import (
    InvalidRequest,
    MediaTooLarge,
)
from tests.support.scheduled_chunks import P, chunks


def test_the_same_picture_in_one_pass_is_encoded_once():
    drive = Drive(max_num_batched_tokens=64)
    for name in "abc":
        drive.add(name, [ord(name), *[P] * 6, 2], [image("A", 1, 6)])
    plan = drive.step()
    assert len(plan.encode) == 1
    assert len(plan.scheduled) == 3
    drive.run()
    assert drive.runner.num_encoded == 1
    assert [drive.first[name].num_encoder_hits for name in "abc"] == [0, 1, 1]
    drive.assert_done()


def test_a_picture_twice_in_one_prompt_is_encoded_once():
    drive = Drive()
    drive.add("a", [1, *[P] * 6, 2, *[P] * 6, 3], [image("A", 1, 6), image("A", 8, 6)])
    drive.run()
    assert drive.runner.num_encoded == 1
    drive.assert_done()


def test_the_encoder_budget_cuts_the_chunk_before_the_item():
    drive = Drive(max_num_batched_tokens=64, encoder_compute_embeds=10)
    drive.add("a", [1, *[P] * 6, 2, *[P] * 6, 3], [image("A", 1, 6), image("B", 8, 6)])
    plan = drive.step()
    assert [len(plan.encode), plan.num_tokens] == [1, 8]
    drive.run()
    assert chunks(drive, "a")[:2] == [(0, 8), (8, 7)]
    drive.assert_done()


def test_without_room_in_the_encoder_cache_an_item_waits_for_another_to_be_consumed():
    drive = Drive(encoder_cache_embeds=12, max_num_batched_tokens=8)
    drive.add("a", [1, *[P] * 12, 2], [image("A", 1, 12)])
    drive.add("b", [3, *[P] * 12, 4], [image("B", 1, 12)])
    drive.run()
    drive.assert_done()
    assert drive.scheduler.encoder.num_evictions == 1


def test_marker_tokens_of_an_item_need_no_encoder_output():
    drive = Drive(max_num_batched_tokens=4)
    drive.add("a", [1, 2, *[P] * 10, 3], [image("A", 2, 10, num_embeds=6)])
    assert drive.step().encode == []
    assert len(drive.step().encode) == 1
    drive.run()
    drive.assert_done()


def test_unchunked_items_are_computed_in_one_step_and_do_not_starve():
    drive = Drive(disable_chunked_mm_input=True, max_num_batched_tokens=16)
    drive.add("text", range(20, 24), max_tokens=30)
    drive.step()
    drive.add("a", [1, 2, *[P] * 16, 3], [image("A", 2, 16)])
    drive.run()
    assert chunks(drive, "a")[:3] == [(0, 2), (2, 16), (18, 1)]
    assert list(drive.finish) == ["a", "text"], "an item as large as the step had to wait"
    drive.assert_done()


@pytest.mark.parametrize("kind", ["item", "prompt"])
def test_groups_are_not_cut(kind):
    traits = ModelTraits(
        vocab_size=1000, max_position=1000, eos_token_ids=(), is_multimodal=True,
        bidirectional=kind, embed_bytes=4,
    )  # fmt: skip
    drive = Drive(traits=traits, max_num_batched_tokens=24)
    drive.add("t", range(20, 32), max_tokens=20)
    for name in ("A", "B"):
        drive.add(name, [1, 2, *[P] * 12, *range(30, 38)], [image(name, 2, 12)])
    drive.run()  # the runner asserts that no group is cut
    drive.assert_done()
    with pytest.raises((MediaTooLarge, InvalidRequest)):
        drive.add("x", [P] * 25, [image("X", 0, 25, num_embeds=4)])


def test_one_key_with_two_sizes_fails_only_the_second_request():
    drive = Drive()
    drive.add("a", [1, *[P] * 6, 2], [image("A", 1, 6)])
    drive.run()
    drive.add("b", [1, *[P] * 7, 2], [image("A", 1, 7)])
    drive.add("c", [3, *[P] * 6, 2], [image("A", 1, 6)])
    drive.run()
    assert drive.finish == {"a": "length", "b": "error", "c": "length"}
    assert "7 encoder outputs here and for 6" in drive.errors["b"][1]
    drive.assert_done()


def test_a_failed_encoding_leaves_no_ghost_in_the_cache():
    drive = Drive(max_num_batched_tokens=64)
    bad = image("bad", 1, 6)
    drive.runner.bad_values.add(content(bad[1]))
    drive.add("a", [1, *[P] * 6, 2], [bad])
    drive.add("b", [2, *[P] * 6, 2], [bad])
    drive.add("c", [3, *[P] * 6, 2], [image("C", 1, 6)])
    drive.run()
    assert drive.finish == {"a": "error", "b": "error", "c": "length"}
    drive.runner.bad_values.clear()
    drive.add("d", [1, *[P] * 6, 2], [bad])
    drive.run()
    assert drive.finish["d"] == "length"
    drive.assert_done()


def test_a_waiting_request_that_gets_no_kv_holds_no_encoder_output():
    """References taken before a failed block allocation used to stay for ever."""
    drive = Drive(num_blocks=8, max_num_batched_tokens=64)
    drive.add("a", range(10, 30), max_tokens=8)
    drive.step()
    drive.add("b", [1, *[P] * 12, 2], [image("B", 1, 12)])
    plan = drive.step()
    assert plan.encode == []
    assert drive.scheduler.encoder.num_used_embeds == 0
    drive.run()
    drive.assert_done()


def test_the_host_tier_saves_encodings():
    drive = Drive(encoder_cache_embeds=16, encoder_host_bytes=4000, prefix_caching=False)
    for turn in range(3):
        for name in ("A", "B", "C"):
            drive.add(f"{name}{turn}", [1, *[P] * 12, 2], [image(name, 1, 12)])
            drive.run()
    assert drive.runner.num_encoded == 3
    assert drive.scheduler.encoder.hits[0, "host"] == 6
    drive.assert_done()


def test_a_sharer_of_a_failed_requests_encoding_starts_over_unharmed():
    """The one it was encoded for fails; whether the output exists is not known, so the other
    throws its step away and encodes the picture itself."""
    drive = Drive(max_num_batched_tokens=64)
    drive.add("a", [1, *[P] * 6, 2], [image("A", 1, 6)])
    drive.add("b", [2, *[P] * 6, 2], [image("A", 1, 6)])
    drive.runner.failures["a"] = "injected"
    drive.step()
    assert drive.outputs["b"] == []
    assert drive.requests["b"].num_preemptions == 1
    drive.run()
    assert drive.finish == {"a": "error", "b": "length"}
    assert drive.runner.num_encoded == 2
    drive.assert_done()


def test_a_cached_prefix_leaves_the_next_item_its_turn_beside_a_stream():
    """A request whose prefix hit ended behind a small item was given room for that one alone: while
    any stream ran, its large item never had a turn."""
    drive = Drive(
        max_num_mixed_tokens=4, max_model_len=1000, num_blocks=400, encoder_compute_embeds=24
    )
    small, large = image("S", 2, 2), image("L", 8, 20)
    prefix = [1, 2, P, P, 3, 4, 5, 6]
    drive.add("first", [*prefix, 50], [small], max_tokens=1)
    drive.run()
    drive.add("stream", range(20, 24), max_tokens=600)
    drive.step()
    drive.add("second", [*prefix, *[P] * 20, 7], [small, large], max_tokens=1)
    for _ in range(20):
        drive.step()
    assert drive.finish.get("second") == "length"
    assert "stream" not in drive.finish
    drive.abort("stream")


@pytest.mark.parametrize(("batch", "length"), [(11, 10), (9, 8)])
def test_newcomers_do_not_take_the_room_a_running_request_waits_for(batch, length):
    """Small items of ever new requests overlapped in the cache, one half computed at any time, so
    that the item of a running request never had room."""
    drive = Drive(
        max_num_batched_tokens=batch, max_model_len=400, num_blocks=200, max_num_seqs=4,
        encoder_cache_embeds=20, encoder_compute_embeds=16,
    )  # fmt: skip
    names = iter(range(1000))

    def arrive():
        name = f"s{next(names)}"
        drive.add(name, [1, *[P] * length, 2], [image(name, 1, length)], max_tokens=1)

    arrive()
    drive.add("large", [21, *[P] * 16, 2], [image("D", 1, 16)], max_tokens=1)
    for _ in range(60):
        while len(drive.scheduler.waiting) < 4:
            arrive()
        drive.step()
        if "large" in drive.finish:
            break
    assert drive.finish.get("large") == "length"
    drive.run()
    drive.assert_done()


def test_requests_whose_items_cannot_be_resident_together_all_run():
    """Each brings five items of which two fit the encoder cache; four of them at once."""
    drive = Drive(encoder_cache_embeds=20, encoder_compute_embeds=16, num_blocks=90)
    for number in range(4):
        names = [f"{number}.{item}" for item in range(5)]
        tokens = [1]
        items = []
        for name in names:
            items.append(image(name, len(tokens), 9))
            tokens += [P] * 9
        drive.add(f"r{number}", [*tokens, 2], items, max_tokens=6)
    drive.run(400)
    assert set(drive.finish.values()) == {"length"}
    assert drive.scheduler.stats.num_no_progress == 0
    drive.assert_done()


def test_a_prompt_in_one_step_with_too_many_items_is_refused_with_the_fix():
    traits = msgspec.structs.replace(FAKE_TRAITS, bidirectional="prompt")
    drive = Drive(traits=traits, encoder_compute_embeds=16)
    items = [image("A", 1, 9), image("B", 10, 9)]
    with pytest.raises(MediaTooLarge, match=r"18 encoder outputs .* 16: send fewer or smaller"):
        drive.add("r", [1, *[P] * 18, 2], items)
    assert drive.scheduler.num_requests == 0


def test_who_is_admitted_and_preempted_in_one_pass_was_never_there():
    """b waited for room for its image, so it goes first; a then needs the block that b has got."""
    drive = Drive(num_blocks=4, encoder_cache_embeds=8, prefix_caching=False)
    drive.add("a", [P] * 8, [image("A", 0, 8)], max_tokens=4)
    drive.add("b", [*[P] * 7, 2], [image("B", 0, 7)], max_tokens=2)
    drive.run()
    assert drive.requests["b"].num_preemptions == 1
    new = [[entry.request_id for entry in plan.new] for plan in drive.plans]
    assert [names for names in new if names] == [["a"], ["b"]]
    assert new.index(["b"]) == 4, "a has ended by then"
    drive.assert_done()


def test_the_second_place_of_an_item_is_a_hit_of_the_first():
    drive = Drive(prefix_caching=False)
    drive.add("a", [1, *[P] * 4, 2, *[P] * 4, 3], [image("A", 1, 4), image("A", 6, 4)])
    drive.run()
    encoder = drive.scheduler.encoder
    assert (encoder.queries, encoder.hits) == ({0: 2}, {(0, "device"): 1})
    assert drive.runner.num_encoded == 1
    drive.assert_done()
