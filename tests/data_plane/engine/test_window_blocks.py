"""Layers with a sliding window in a pool of their own: what requests give back, what is a hit.

The fake runner keeps both pools' contents and asserts that whatever a step's tokens see through the
window is there, and is what the other layers hold of the same positions.
"""

from __future__ import annotations

import random

import msgspec
import pytest

from foveal_runtime.engine.caches.block_pool import BlockPool
from foveal_runtime.engine.scheduler.window_blocks import WindowBlocks
from foveal_runtime.engine.testing.drive import Drive, image
from foveal_runtime.engine.testing.fake_runner import FAKE_TRAITS
from foveal_runtime.engine.types.step import ModelTraits
from foveal_runtime.plan.budget.kv import KVBlocks, KVShape

WINDOW = 10


def windowed(traits: ModelTraits = FAKE_TRAITS, **limits) -> Drive:
    """Blocks of 4 tokens: of a running request's window pool 3 or 4, and up to 12 in a chunk."""
    settings = {"num_blocks": 300, "num_window_blocks": 60, "window": WINDOW, **limits}
    return Drive(traits=traits, **settings)


def fresh(number: int, count: int = 60) -> list[int]:
    return [1000 * number + i for i in range(count)]


@pytest.mark.parametrize("run_ahead", [False, True])
def test_a_running_request_holds_a_window(run_ahead: bool) -> None:
    drive = windowed(run_ahead=run_ahead, prefix_caching=False)
    request = drive.add("long", fresh(1, 120), max_tokens=60)
    most = []
    while drive.scheduler.has_work or drive._under_way:
        drive.step()
        most.append((len(request.block_ids), len(request.window_ids)))
    drive.assert_done()
    assert max(most) >= (44, 3)
    assert max(window for _, window in most) <= 4  # between two steps: no chunk is under way
    assert drive.scheduler.windows.pool.num_free_blocks == 60


def test_more_requests_run_than_one_pool_would_hold() -> None:
    """Of eight requests of 150 tokens the windows' pool has room for one and a half as a whole."""
    drive = windowed(num_window_blocks=60, max_num_batched_tokens=32, prefix_caching=False)
    for number in range(8):
        drive.add(f"{number}", fresh(number, 110), max_tokens=40)
    most = 0
    while drive.scheduler.has_work:
        drive.step()
        most = max(most, len(drive.scheduler.running))
    drive.assert_done()
    assert most == 8
    assert drive.scheduler.stats.num_preemptions == 0


def test_a_hit_needs_the_window_before_it_and_no_more() -> None:
    drive = windowed()
    prompt = fresh(1)
    assert drive.ask("first", prompt) == 0
    pool = drive.scheduler.windows.pool
    hashes = drive.requests["first"].block_hashes
    for block_hash in hashes[:11]:  # what was left behind long ago may go
        pool._forget(pool.get(block_hash))
    assert drive.ask("again", prompt) == 56
    drive.assert_done()


def test_a_prefix_whose_window_is_gone_is_continued_further_up() -> None:
    """All of it is in the other pool. It was computed again from the deepest whole window on."""
    drive = windowed()
    prompt = fresh(1)
    drive.ask("first", prompt)
    pool = drive.scheduler.windows.pool
    lost = pool.get(drive.requests["first"].block_hashes[12])
    pool._forget(lost)
    assert drive.ask("again", prompt) == 48
    assert drive.scheduler.stats.num_stateless_tokens == 8
    assert drive.ask("third", prompt) == 56  # and is whole again
    drive.assert_done()


def test_pools_evict_by_themselves() -> None:
    """Many prompts pass through a small pool of windows: only what came last is continued. A
    window that is left is of no use where the other pool has lost a block."""
    drive = windowed(num_window_blocks=20)
    for number in range(1, 5):
        drive.ask(f"{number}", fresh(number), max_tokens=1)
    assert drive.scheduler.windows.pool.num_evictions > 0 == drive.scheduler.pool.num_evictions
    assert drive.ask("last", fresh(4), max_tokens=1) == 56
    assert drive.ask("old", fresh(1), max_tokens=1) == 0
    assert drive.scheduler.stats.num_stateless_tokens == 56
    pool = drive.scheduler.pool
    pool._forget(pool.get(drive.requests["old"].block_hashes[0]))
    assert drive.ask("lost", fresh(1), max_tokens=1) == 0
    drive.assert_done()


def test_a_window_that_was_lost_makes_the_rest_of_a_prefix_no_older() -> None:
    """A beginning that is asked for again and again. Its window goes now and then, and what is
    computed once more for that is as young in the other pool as if it had been found."""
    rng = random.Random(3)
    drive, common = windowed(max_model_len=400), fresh(1, 160)
    found = []
    for number in range(6):
        more = [rng.randrange(10**6) for _ in range(80)]
        found.append(drive.ask(f"{number}", [*common, *more], max_tokens=1))
        for other in range(9):
            text = [rng.randrange(10**6) for _ in range(100)]
            drive.ask(f"{number}-{other}", text, max_tokens=1)
    drive.assert_done()
    assert found == [0, 0, 160, 160, 160, 160]


def full_of_others(**options) -> Drive:
    """One request runs at a time, in pools that are full of what others left."""
    rng = random.Random(1)
    drive = windowed(max_model_len=400, max_num_seqs=1, encoder_compute_embeds=22, **options)
    for number in range(40):
        drive.add(f"{number}", [rng.randrange(10**6) for _ in range(100)], max_tokens=1)
    drive.run()
    return drive


@pytest.mark.parametrize("num_item", [0, 22])
def test_prompts_that_come_together_compute_what_they_share_once(num_item: int) -> None:
    """The first one passes the end of the common part long before the next one starts there. Where
    that is within an item, the next one starts before the item."""
    drive = full_of_others(traits=msgspec.structs.replace(FAKE_TRAITS, bidirectional="item"))
    common = [*fresh(1, 162 - num_item), *[9] * num_item]
    items = [image("cat", 162 - num_item, num_item)] if num_item else []
    requests = [
        drive.add(f"burst {number}", [*common, *fresh(2 + number, 80)], items, max_tokens=1)
        for number in range(4)
    ]
    drive.run()
    drive.assert_done()
    shared = 140 if num_item else 160
    assert [request.num_cached_tokens for request in requests] == [0, *[shared] * 3]


def test_a_prompt_that_is_a_part_of_another_finds_its_window() -> None:
    """Of a prompt that is cached as a whole the last block is computed in any case."""
    drive = full_of_others()
    drive.add("long", fresh(1, 180), max_tokens=1)
    part = drive.add("part", fresh(1, 80), max_tokens=1)
    drive.run()
    drive.assert_done()
    assert part.num_cached_tokens == 76


def test_a_prompt_is_not_overlooked_behind_many_streams() -> None:
    """A new request is compared with few others; streams have no prompt left to compute."""
    drive = windowed(max_num_seqs=80, max_num_batched_tokens=256, num_window_blocks=200)
    for number in range(70):
        drive.add(f"{number}", fresh(number, 3), max_tokens=3)
    drive.step()
    first = drive.add("first", [*fresh(100, 40), 1, 2, 3])
    drive.add("second", [*fresh(100, 40), 4])
    assert first.window_kept == {(7, 10)}
    drive.run()
    drive.assert_done()


def test_a_long_prompt_leaves_the_ends_of_others(monkeypatch) -> None:
    """Blocks in its middle are taken first. The control has one order for all."""
    hits, release = [], BlockPool.release
    for keeps_order in (False, True):
        if keeps_order:
            monkeypatch.setattr(BlockPool, "release", lambda *args, is_cold=False: release(*args))
        drive = windowed(num_window_blocks=30)
        drive.ask("short", fresh(1), max_tokens=1)
        drive.ask("long", fresh(2, 190), max_tokens=1)
        hits.append(drive.ask("again", fresh(1), max_tokens=1))
        drive.assert_done()
    assert hits == [56, 0]


def converse(drive: Drive, rng: random.Random) -> None:
    """Forty chats in turn, each of which grows by a question and an answer."""
    said = {chat: fresh(chat) for chat in range(40)}
    for turn in range(6):
        for chat in rng.sample(sorted(said), len(said)):
            drive.add(f"{chat}-{turn}", said[chat], max_tokens=40)
            if rng.random() < 0.5:
                drive.run()
        drive.run()
        for chat in said:
            question = [rng.randrange(30_000) for _ in range(30)]
            said[chat] = [*said[chat], *drive.outputs[f"{chat}-{turn}"], *question]


def share_beginnings(drive: Drive, rng: random.Random) -> None:
    """Prompts that begin with one of eight texts and go on far beyond a window."""
    for number in range(240):
        more = [rng.randrange(30_000) for _ in range(rng.randint(20, 400))]
        drive.add(f"{number}", [*fresh(rng.randrange(8), 200), *more], max_tokens=20)
        if number % 4 == 3:
            drive.run()


@pytest.mark.parametrize(("trace", "num_bytes"), [(converse, 12_000), (share_beginnings, 8_000)])
def test_the_same_memory_gives_more_hits_than_one_pool(trace, num_bytes: int) -> None:
    """Too little for all that comes again. As in Gemma 3, five of six layers have a window."""
    shape = KVShape(
        block_size=4, block_bytes=6, window_block_bytes=5, window=64, step_tokens=128,
        max_model_len=1000,
    )  # fmt: skip
    found = []
    for pools in ({}, {"window": 64}):
        blocks = shape.divide(num_bytes) if pools else KVBlocks(num_bytes // 6, 0)
        if pools:
            pools["num_window_blocks"] = blocks.window - 1
        drive = Drive(
            num_blocks=blocks.whole - 1, max_num_batched_tokens=128, max_model_len=1000,
            check=False, **pools,
        )  # fmt: skip
        trace(drive, random.Random(3))
        drive.assert_done()
        found.append(drive.scheduler.stats.num_prefix_hit_tokens)
    assert found[1] > 1.05 * found[0] > 0


def test_a_conversation_goes_on_where_its_answer_ended() -> None:
    drive = windowed()
    history = fresh(1, 30)
    drive.ask("0", history, max_tokens=33)
    for turn in range(1, 4):
        history = [*history, *drive.outputs[str(turn - 1)]]
        computed = len(history) - 1  # the last output was sampled, not computed
        history += [turn] * 9
        if len(history) > 150:
            break
        assert drive.ask(str(turn), history, max_tokens=13) == computed // 4 * 4
    drive.assert_done()


def test_a_hit_that_is_cut_to_an_item_has_its_window() -> None:
    """The prefix is cut twice: to a whole window, and from within the item to its start."""
    traits = ModelTraits(
        vocab_size=60, max_position=500, eos_token_ids=(), is_multimodal=True,
        bidirectional="item", embed_bytes=32,
    )  # fmt: skip
    drive = windowed(traits)
    cat = image("cat", 21, 20, 10)
    prompt = [*fresh(1, 21), *[9] * 20, *fresh(2, 9)]
    drive.ask("first", prompt, [cat])
    pool = drive.scheduler.windows.pool
    pool._forget(pool.get(drive.requests["first"].block_hashes[10]))  # positions 40 ... 43
    assert drive.ask("again", prompt, [cat]) == 20
    drive.assert_done()


def test_a_preempted_request_goes_on_from_its_blocks() -> None:
    drive = windowed(num_blocks=60, max_num_batched_tokens=64)
    for name in "abc":
        drive.add(name, fresh(ord(name), 40), max_tokens=60)
    drive.run()
    drive.assert_done()
    assert drive.scheduler.stats.num_preemptions > 0


def test_a_full_pool_of_windows_preempts() -> None:
    """There are blocks enough in the other pool; what the last to come holds is taken."""
    drive = windowed(num_window_blocks=13, max_num_batched_tokens=32)
    for number in range(4):
        drive.add(f"{number}", fresh(number, 3), max_tokens=60)
    drive.run()
    drive.assert_done()
    assert drive.scheduler.stats.num_preemptions > 0


def test_a_reset_forgets_windows_and_wrong_media_are_in_none() -> None:
    drive = windowed()
    drive.ask("first", fresh(1))
    drive.scheduler.reset_prefix_cache()
    assert drive.scheduler.windows.pool.num_cached_blocks == 0
    assert drive.ask("again", fresh(1)) == 0
    picture = image("cat", 5, 14)
    drive.add("wrong", [*[9] * 19, *fresh(2, 30)], [picture], max_tokens=30)
    for _ in range(6):
        drive.step()
    assert drive.scheduler.get("wrong").num_computed > 40
    drive.scheduler.forget_media([picture[0].mm_hash])
    drive.run()
    drive.assert_done()
    assert drive.scheduler.windows.pool.num_cached_blocks == 0


def given_back_early(self: WindowBlocks, position: int) -> int:
    return max(position - WINDOW + 1 + 4, 0) // 4


def hit_of_one_pool(self: WindowBlocks, request, num_blocks: int) -> tuple[int, list[int]]:
    return num_blocks, []


@pytest.mark.parametrize(
    ("name", "wrong"), [("first_of", given_back_early), ("lookup", hit_of_one_pool)]
)
def test_what_is_seen_and_was_given_back_is_noticed(name, wrong, monkeypatch) -> None:
    """Controls: a block that is freed one too early, a hit on the other pool alone."""
    monkeypatch.setattr(WindowBlocks, name, wrong)
    drive = windowed(check=False)
    for name in ("first", "again"):
        drive.add(name, fresh(1))
    with pytest.raises(AssertionError, match="a block is seen that was given back"):
        drive.run()
