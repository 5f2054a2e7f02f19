"""Every branch of the encoder budget."""

import logging

import pytest

from foveal_runtime.plan.budget.encoder import LargestItem, compute_encoder_budget

IMAGE, VIDEO = LargestItem(576, 576), LargestItem(2227, 2197)


def budget(largest, *, is_multimodal=True, batched=2048, compute=0, cache=0, no_chunks=False):
    return compute_encoder_budget(
        is_multimodal=is_multimodal,
        largest=largest,
        max_num_batched_tokens=batched,
        max_num_encoder_input_tokens=compute,
        encoder_cache_size=cache,
        disable_chunked_mm_input=no_chunks,
    )


def test_a_text_only_model_has_none():
    assert budget({"image": IMAGE}, is_multimodal=False, compute=99, cache=99) == (0, 0)


def test_all_modalities_disabled_warns_and_has_none(caplog):
    with caplog.at_level(logging.WARNING):
        assert budget({}, compute=99, cache=99) == (0, 0)
    assert "disabled" in caplog.text


def test_the_largest_item_always_fits():
    assert budget({"image": IMAGE, "video": VIDEO}) == (2197, 2197)
    assert budget({"image": IMAGE}, compute=100, cache=200) == (576, 576)


def test_what_is_asked_for_counts_when_it_is_more():
    assert budget({"image": IMAGE}, compute=5000, cache=100) == (5000, 576)
    assert budget({"image": IMAGE}, compute=100, cache=5000) == (576, 5000)


def test_without_chunks_an_item_must_fit_a_step_and_both_numbers_are_named():
    with pytest.raises(ValueError, match=r"2227.*2048"):
        budget({"image": IMAGE, "video": VIDEO}, no_chunks=True)
    assert budget({"video": VIDEO}, no_chunks=True, batched=2227) == (2197, 2197)


def test_the_chunk_check_counts_tokens_not_embeddings():
    """2,200 tokens hold the 2,197 embeddings of the video but not its 2,227 positions."""
    with pytest.raises(ValueError, match=r"2227.*2200"):
        budget({"video": VIDEO}, no_chunks=True, batched=2200)
