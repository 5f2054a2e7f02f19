"""Block names, hits and what may not hit."""

from foveal_runtime.engine.caches.block_pool import BlockPool
from foveal_runtime.engine.caches.prefix_cache import BlockHasher, cut_to_groups, extra_keys
from foveal_runtime.engine.testing.drive import Drive, image
from foveal_runtime.engine.testing.fake_runner import FAKE_TRAITS
from foveal_runtime.engine.types.request import Request
from foveal_runtime.engine.types.step import MMInput
from foveal_runtime.plan.media import PlaceholderRange
from foveal_runtime.plan.sampling import SamplingParams

P = 9  # the placeholder id: the same for every image


def _item(key: bytes, offset: int, length: int) -> MMInput:
    return MMInput(key, 0, PlaceholderRange(offset, length, ((0, length),)))


def _hashes(tokens, items=(), salt=b"", namespace=b""):
    request = Request(
        "r", list(tokens), SamplingParams(max_tokens=1), mm_inputs=tuple(items),
        values=(b"",) * len(items), cache_salt=salt,
    )  # fmt: skip
    BlockHasher(4, namespace).extend(request, len(tokens))
    return request.block_hashes


def test_extra_keys_name_each_item_that_overlaps_a_block():
    # T T P P | P P P T | T P P P, blocks of 4
    inputs = (_item(b"aaa", 2, 5), _item(b"bbb", 9, 3))
    found, at = [], 0
    for start in (0, 4, 8):
        keys, at = extra_keys(inputs, start, start + 4, at)
        found.append(keys)
    assert found == [((b"aaa", 2),), ((b"aaa", -2),), ((b"bbb", 1),)]


def test_a_block_between_two_items_names_both():
    inputs = (_item(b"aaa", 0, 2), _item(b"bbb", 3, 4))
    assert extra_keys(inputs, 0, 4)[0] == ((b"aaa", 0), (b"bbb", 3))
    assert extra_keys(inputs, 4, 8) == (((b"bbb", -1),), 1)


def test_a_block_between_items_that_end_and_begin_at_its_bounds_names_neither():
    inputs = (_item(b"aaa", 0, 4), _item(b"bbb", 8, 4))
    assert extra_keys(inputs, 4, 8) == ((), 1)


def test_names_differ_by_content_place_salt_and_namespace():
    tokens = [1, P, P, P, P, P, 2, 3]
    base = _hashes(tokens, [_item(b"a" * 32, 1, 5)])
    assert base == _hashes(tokens, [_item(b"a" * 32, 1, 5)])
    assert len(set(base)) == 2
    for other in (
        _hashes(tokens, [_item(b"b" * 32, 1, 5)]),
        _hashes(tokens, [_item(b"a" * 32, 2, 4)]),
        _hashes(tokens),
        _hashes(tokens, [_item(b"a" * 32, 1, 5)], salt=b"tenant"),
        _hashes(tokens, [_item(b"a" * 32, 1, 5)], namespace=b"other weights"),
    ):
        assert not set(base) & set(other)


def test_an_item_after_the_block_changes_nothing_before_it():
    tokens = [1, 2, 3, 4, P, P, P, P]
    with_a, with_b = (_hashes(tokens, [_item(k * 32, 4, 4)]) for k in (b"a", b"b"))
    assert with_a[0] == with_b[0]
    assert with_a[1] != with_b[1]


def test_hashes_grow_with_the_sequence_and_equal_those_made_at_once():
    tokens = list(range(100, 119))
    items = (_item(b"a" * 32, 3, 6), _item(b"b" * 32, 10, 3))
    grown = Request(
        "r", tokens[:5], SamplingParams(max_tokens=1), mm_inputs=items, values=(b"",) * 2
    )
    hasher = BlockHasher(4)
    for end in range(5, 20):
        grown.token_ids = tokens[:end]
        hasher.extend(grown, end)
        assert len(grown.block_hashes) == end // 4
    assert grown.block_hashes == _hashes(tokens, items)


def test_free_blocks_keep_their_content_until_taken_and_prefixes_live_longest():
    removed = []
    pool = BlockPool(4, on_removed=removed.append)
    blocks = pool.allocate(3)
    for block, name in zip(blocks, (b"0", b"1", b"2"), strict=True):
        assert pool.publish(block, name)
    pool.release(blocks)
    pool.check_integrity([])
    assert pool.lookup([b"0", b"1", b"2", b"3"], 9) == blocks
    assert pool.lookup([b"0", b"1", b"2"], 2) == blocks[:2]
    taken = pool.allocate(2)  # the never used one, then the tail of the prefix
    assert removed == [b"2"]
    assert pool.lookup([b"0", b"1", b"2"], 9) == blocks[:2]
    pool.share(blocks[:2])
    assert pool.num_free_blocks == 0
    pool.check_integrity([taken, blocks[:2]])
    pool.release(blocks[:2])
    assert pool.reset() == 2
    assert removed == [b"2", b"1", b"0"] or sorted(removed) == [b"0", b"1", b"2"]
    pool.check_integrity([taken])


def test_a_second_block_with_the_same_content_stays_private_and_goes_first():
    pool = BlockPool(3)
    one, two = pool.allocate(1), pool.allocate(1)
    assert pool.publish(one[0], b"x")
    assert not pool.publish(two[0], b"x")
    pool.release(one)
    pool.release(two)
    assert pool.allocate(1) == two
    assert pool.lookup([b"x"], 1) == one


def test_content_that_is_computed_again_is_as_young_as_what_was_found():
    """The free block that held it is the next to be taken; nothing is lost, so nobody is told."""
    removed: list[bytes] = []
    pool = BlockPool(3, on_removed=removed.append)
    blocks = pool.allocate(2)
    for block, name in zip(blocks, [b"old", b"other"], strict=True):
        assert pool.publish(block, name)
        pool.release([block])
    again = pool.allocate(1)
    assert not pool.publish(again[0], b"old")
    pool.check_integrity([again])
    assert pool.lookup([b"old"], 1) == again
    pool.release(again)
    assert pool.num_cached_blocks == 2
    assert pool.allocate(1) == blocks[:1]
    assert pool.num_evictions == 0 == len(removed)
    pool.allocate(1)
    assert removed == [b"other"]
    assert pool.num_evictions == 1


def _compute(pool, *names):
    blocks = pool.allocate(len(names))
    for block, name in zip(blocks, names, strict=True):
        pool.publish(block, name)
    pool.release(blocks)
    pool.check_integrity([])
    return blocks


def test_blocks_in_reserve_are_not_written_while_nothing_repeats():
    pool = BlockPool(12, num_reserved=8)
    assert pool.num_free_blocks == 12
    written = {block for at in range(20) for block in _compute(pool, b"%d" % at, b"x%d" % at)}
    assert written == {1, 2, 3, 4}
    # More at once than are in use so far: as many as that takes.
    blocks = pool.allocate(7)
    assert set(blocks) == set(range(1, 8))
    pool.check_integrity([blocks])
    pool.release(blocks)
    assert pool.num_free_blocks == 12
    assert max(pool.allocate(7)) == 7


def test_the_reserve_is_used_once_it_would_have_kept_what_is_asked_for():
    removed = []
    pool = BlockPool(6, num_reserved=4, on_removed=removed.append)
    _compute(pool, b"a0", b"a1")
    _compute(pool, b"b0", b"b1")
    assert pool.lookup([b"c0"], 9) == []
    _compute(pool, b"c0", b"c1")
    assert removed == [b"a1", b"a0", b"b1", b"b0"]
    assert pool.lookup([b"a0", b"a1"], 9) == []
    pool.check_integrity([])
    assert pool.num_cached_blocks == 2
    _compute(pool, b"a0", b"a1")
    _compute(pool, b"b0", b"b1")
    assert len(removed) == 4, "four blocks were free"
    assert all(len(pool.lookup([name + b"0", name + b"1"], 9)) == 2 for name in (b"a", b"b", b"c"))
    _compute(pool, b"d0", b"d1")
    assert removed[4:] == [b"c1", b"c0"]


def test_what_the_reserve_would_not_have_kept_either_leaves_it_unused():
    pool = BlockPool(5, num_reserved=3)
    for name in (b"a", b"b", b"c", b"d", b"e", b"f"):
        _compute(pool, name)
    assert pool.lookup([b"a"], 1) == []  # five blocks would hold b to f
    assert max(_compute(pool, b"g")) <= 2
    assert pool.lookup([b"c"], 1) == []  # and now c to g
    assert min(_compute(pool, b"c")) > 2


def test_content_that_was_reset_is_not_missed():
    pool = BlockPool(4, num_reserved=2)
    for name in (b"a", b"b", b"c"):
        _compute(pool, name)
    pool.reset()
    assert pool.lookup([b"a"], 1) == pool.lookup([b"c"], 1) == []
    assert max(_compute(pool, b"a") + _compute(pool, b"d") + _compute(pool, b"e")) == 2


def test_prompts_that_come_back_too_late_are_missed_once_and_never_again():
    """Each prompt fills five blocks, of which 16 are in use at first: two of five are given up by
    the time that the first comes back."""
    drive = Drive(num_reserved_blocks=48)
    prompts = [list(range(at * 20, at * 20 + 18)) for at in range(1, 6)]
    hits = []
    for turn in range(3):
        for at, prompt in enumerate(prompts):
            drive.add(f"{turn}.{at}", prompt)
            drive.run()
            hits.append(drive.first[f"{turn}.{at}"].num_cached_tokens)
    assert hits[:5] == [0] * 5
    assert hits[5:10] == [0, 0, 16, 16, 16]
    assert hits[10:] == [16] * 5
    drive.assert_done()


def test_a_hit_never_covers_the_last_prompt_token():
    drive = Drive()
    prompt = list(range(10, 18))  # exactly two blocks
    for name in ("a", "b"):
        drive.add(name, prompt)
        drive.run()
    assert drive.first["a"].num_cached_tokens == 0
    assert drive.first["b"].num_cached_tokens == 4
    assert drive.outputs["a"] == drive.outputs["b"]
    drive.assert_done()


def test_two_images_under_the_same_placeholders_never_share_blocks():
    """Placeholder ids are equal for all images: without content keys in the block names, the
    second request would be answered from the first one's image."""
    for warm in ("none", "encoder", "prefix", "both"):
        drive = Drive()
        prompt = [1, *[P] * 6, 2, 3, 4, 5, 6]
        for name, picture in (("a", "A"), ("b", "B"), ("a2", "A"), ("b2", "B")):
            drive.add(name, prompt, [image(picture, 1, 6)])
            drive.run()
            if warm in ("none", "prefix"):
                drive.scheduler.reset_encoder_cache()
            if warm in ("none", "encoder"):
                drive.scheduler.reset_prefix_cache()
        assert drive.outputs["a"] == drive.outputs["a2"] != drive.outputs["b"]
        assert drive.outputs["b"] == drive.outputs["b2"]
        cached = {"none": 0, "encoder": 0, "prefix": 8, "both": 8}[warm]
        assert drive.first["b2"].num_cached_tokens == cached
        assert drive.first["a"].num_cached_tokens == drive.first["b"].num_cached_tokens == 0
        assert drive.runner.num_encoded == (4 if warm == "none" else 2)
        drive.assert_done()


def test_images_at_swapped_places_are_different_prompts():
    drive = Drive()
    prompt = [1, P, P, P, P, 2, P, P, P, P, 3, 4]
    drive.add("ab", prompt, [image("A", 1, 4), image("B", 6, 4)])
    drive.run()
    drive.add("ba", prompt, [image("B", 1, 4), image("A", 6, 4)])
    drive.run()
    assert drive.first["ba"].num_cached_tokens == 0
    assert drive.runner.num_encoded == 2
    drive.assert_done()


def test_tenants_do_not_see_each_others_prefixes():
    drive = Drive()
    for name, salt in (("a", b""), ("b", b"t1"), ("c", b"t2"), ("d", b"t1")):
        drive.add(name, range(10, 23), cache_salt=salt)
        drive.run()
    cached = [drive.first[name].num_cached_tokens for name in "abcd"]
    assert cached == [0, 0, 0, 12]


def test_prompt_logprobs_do_not_read_the_cache_but_fill_it():
    drive = Drive()
    sampling = SamplingParams(max_tokens=2, prompt_logprobs=1, ignore_eos=True)
    for name in ("a", "b"):
        drive.add(name, range(10, 30), sampling=sampling)
        drive.run()
        assert drive.first[name].num_cached_tokens == 0
        entries = drive.first[name].prompt_logprobs
        assert entries[0] is None
        assert len(entries) == 20
        assert all(entry is not None for entry in entries[1:])
    drive.add("c", range(10, 30))
    drive.run()
    assert drive.first["c"].num_cached_tokens == 16
    assert drive.scheduler.stats.num_prefix_query_tokens == 20
    assert drive.scheduler.stats.num_prefix_hit_tokens == 16


def test_hits_are_cut_back_to_the_start_of_a_group():
    inputs = (_item(b"a" * 32, 2, 5), _item(b"b" * 32, 7, 6))
    assert cut_to_groups(inputs, 3, 4) == 0  # 12 is inside b; 7 // 4 = 1, 4 is inside a
    assert cut_to_groups(inputs, 4, 4) == 4
    traits = FAKE_TRAITS.__class__(
        vocab_size=1000, max_position=1000, eos_token_ids=(), is_multimodal=True,
        bidirectional="item", embed_bytes=4,
    )  # fmt: skip
    drive = Drive(traits=traits)
    prompt = [*range(10, 15), *[P] * 8, *range(20, 25)]
    for name, tail in (("a", [1]), ("b", [2])):
        drive.add(name, [*prompt, *tail], [image("A", 5, 8)])
        drive.run()
    assert drive.first["b"].num_cached_tokens == 16
    drive.add("c", [*prompt[:11], P, P, 7], [image("A", 5, 8)])
    drive.run()
    assert drive.first["c"].num_cached_tokens == 4  # two blocks would end inside the image
    drive.assert_done()


def test_prefix_lm_prompts_are_never_taken_from_the_cache():
    traits = FAKE_TRAITS.__class__(
        vocab_size=1000, max_position=1000, eos_token_ids=(), is_multimodal=True,
        bidirectional="prompt", embed_bytes=4,
    )  # fmt: skip
    drive = Drive(traits=traits)
    for name in ("a", "b"):
        drive.add(name, [1, P, P, P, P, *range(20, 30)], [image("A", 1, 4)])
        drive.run()
    assert drive.first["b"].num_cached_tokens == 0
    drive.assert_done()
