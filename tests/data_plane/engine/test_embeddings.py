"""Requests that are embedded instead of continued, through the scheduler and the engine's core."""

import msgspec
import pytest

from foveal_runtime.engine.testing.drive import Drive, image
from foveal_runtime.engine.testing.fake_runner import FAKE_TRAITS
from foveal_runtime.plan.errors import ContextLengthExceeded, Unsupported
from foveal_runtime.plan.sampling import SamplingParams
from tests.support.scheduled_chunks import P, chunks


def pooled(kind: str) -> SamplingParams:
    return SamplingParams(max_tokens=1, pooling=kind)


@pytest.mark.parametrize("kind", ["mean", "last", "cls"])
def test_a_prompt_in_chunks_beside_a_stream_is_embedded(kind):
    drive = Drive(max_num_batched_tokens=10)
    drive.add("stream", range(20, 24), max_tokens=6)
    drive.step()
    drive.add("embed", range(100, 125), sampling=pooled(kind))
    drive.run()
    assert chunks(drive, "embed") == [(0, 9), (9, 9), (18, 7)]
    assert drive.embeddings.keys() == {"embed"}
    assert drive.finish == {"stream": "length", "embed": "stop"}
    assert drive.first["embed"].num_prompt_tokens == 25
    drive.assert_done()


def test_only_the_last_token_may_come_after_a_cached_prefix():
    for kind, num_cached in (("last", 16), ("mean", 0), ("cls", 0)):
        drive = Drive()
        drive.add("chat", range(100, 118), max_tokens=2)
        drive.run()
        drive.add("embed", range(100, 118), sampling=pooled(kind))
        drive.run()
        assert drive.first["embed"].num_cached_tokens == num_cached, kind
        drive.assert_done()


def test_an_image_is_encoded_once_for_chat_and_search():
    drive = Drive()
    prompt = [1, *[P] * 5, 2]
    drive.add("chat", prompt, [image("A", 1, 5)], max_tokens=2)
    drive.run()
    drive.add("embed", [7, *prompt], [image("A", 2, 5)], sampling=pooled("mean"))
    drive.run()
    assert drive.runner.num_encoded == 1
    assert drive.first["embed"].num_encoder_hits == 1
    drive.assert_done()


def test_a_preempted_one_starts_its_sum_again():
    """Even where its own blocks are still cached: nobody kept what it had summed up."""
    drive = Drive(max_num_batched_tokens=16)
    request = drive.add("embed", range(100, 144), sampling=pooled("mean"))
    drive.step()
    drive.scheduler.preempt(request)
    drive.run()
    assert chunks(drive, "embed") == [(0, 16), (0, 16), (16, 16), (32, 12)]
    assert "embed" in drive.embeddings
    drive.assert_done()


def test_streams_run_ahead_of_a_step_that_ends_an_embedding():
    drive = Drive(run_ahead=True)
    drive.add("stream", range(20, 24), max_tokens=12)
    drive.add("embed", range(100, 110), sampling=pooled("last"))
    drive.run()
    assert drive.num_ahead
    assert "embed" in drive.embeddings
    drive.assert_done()


def test_the_whole_context_may_be_prompt():
    drive = Drive(max_model_len=40)
    drive.add("fits", range(100, 140), sampling=pooled("mean"))
    drive.run()
    assert "fits" in drive.embeddings
    for sampling in (pooled("mean"), SamplingParams(max_tokens=1)):
        with pytest.raises(ContextLengthExceeded):
            drive.add("long", range(100, 141 - (not sampling.pooling)), sampling=sampling)
    drive.assert_done()


def test_an_encoder_computes_whole_prompts_and_generates_nothing():
    encoder = msgspec.structs.replace(FAKE_TRAITS, bidirectional="prompt", generates=False)
    drive = Drive(traits=encoder, max_num_batched_tokens=20)
    with pytest.raises(Unsupported, match="encoder"):
        drive.add("chat", range(100, 110), max_tokens=2)
    for name in ("a", "b", "again"):
        drive.add(name, range(100, 118), sampling=pooled("last"))
    drive.run()
    for name in ("a", "b", "again"):
        assert chunks(drive, name) == [(0, 18)]
        assert drive.first[name].num_cached_tokens == 0
    assert drive.embeddings.keys() == {"a", "b", "again"}
    drive.assert_done()


def test_one_that_fails_ends_alone():
    drive = Drive()
    drive.add("good", range(100, 110), sampling=pooled("mean"))
    drive.add("bad", range(200, 210), sampling=pooled("mean"))
    drive.runner.failures["bad"] = "not finite"
    drive.run()
    assert drive.embeddings.keys() == {"good"}
    assert drive.errors["bad"] == ("engine_error", "not finite")
    drive.assert_done()
