"""Encoder outputs of a real model on disk: the answers after a restart are the same."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from foveal_runtime.engine.caches.warm import WarmSet
from foveal_runtime.engine.scheduler.scheduler import Scheduler
from foveal_runtime.engine.types.limits import SchedulerLimits
from foveal_runtime.engine.types.request import Request
from foveal_runtime.model.device import Device
from foveal_runtime.model.runner import traits
from foveal_runtime.model.runner.encoder import EncoderStore

CPU = Device(torch.device("cpu"))


def scheduler_of(runner, *, cache_embeds: int, host_bytes: int) -> Scheduler:
    limits = SchedulerLimits(
        num_blocks=runner.num_blocks,
        block_size=runner.block_size,
        max_num_batched_tokens=64,
        max_num_seqs=4,
        max_model_len=200,
        encoder_compute_embeds=cache_embeds,
        encoder_cache_embeds=cache_embeds,
        encoder_host_bytes=host_bytes,
        prefix_caching=False,
    )
    clock = iter(range(1, 10_000))
    return Scheduler(limits, runner.traits, clock=lambda: float(next(clock)))


def answer(scheduler: Scheduler, runner, jobs) -> None:
    for job in jobs:
        prompt = list(job.prompt)
        scheduler.add(
            Request(
                job.request_id, prompt, job.sampling, num_prompt_tokens=len(prompt),
                mm_inputs=job.mm_inputs, values=job.values, arrival_seconds=0.0,
            )
        )  # fmt: skip
        while scheduler.has_work:
            plan = scheduler.schedule()
            scheduler.update(plan, runner.execute(plan))
            for _, output in scheduler.take_outputs():
                assert output.error is None, output.error
                job.tokens.extend(output.token_ids)


@pytest.mark.parametrize("name", ["llava", "qwen3_vl"])
def test_a_restarted_runner_answers_from_the_warm_set(name: str, bench, tmp_path) -> None:
    """qwen3_vl: several levels an output. Half of the outputs come back into the host tier."""
    one = bench(name)
    kind = next(iter(one.case.items))
    prompts = [one.prompt(5, [(kind, seed)]) for seed in (1, 2, 3, 4)]
    jobs = [one.job(f"first {n}", prompt) for n, prompt in enumerate(prompts)]
    largest = max(job.mm_inputs[0].placeholder.num_embeds for job in jobs)
    sizes = {
        "cache_embeds": 2 * largest,
        "host_bytes": 2 * largest * one.runner.traits.embed_bytes,
    }
    scheduler = scheduler_of(one.runner, **sizes)
    answer(scheduler, one.runner, jobs)
    warm = WarmSet(str(tmp_path), 1 << 20, namespace=b"n" * 16, traits=one.runner.traits)
    assert warm.save(scheduler.encoder, one.runner) == 4

    other = bench(name)
    scheduler = scheduler_of(other.runner, **sizes)
    loaded = warm.load(scheduler.encoder, other.runner)
    assert (len(loaded.device), len(loaded.host)) == (2, 2)
    other.runner.check_integrity()
    again = [other.job(f"again {n}", prompt) for n, prompt in reversed(list(enumerate(prompts)))]
    answer(scheduler, other.runner, again)
    assert scheduler.stats.encoded_items.get(kind, 0) < 2, "the first two hits need no encoder"
    assert scheduler.encoder.num_hits >= 3
    assert scheduler.encoder.hits[0, "host"] >= 1
    for job, prompt in zip(again, reversed(prompts), strict=True):
        other.check(job, prompt)


def test_outputs_of_another_release_are_encoded_again(bench, tmp_path, monkeypatch) -> None:
    """A release may encode, or read media, otherwise under the same key: what it puts right must
    not come back from the disk."""
    one = bench("llava")
    kind = next(iter(one.case.items))
    job = one.job("first", one.prompt(5, [(kind, 1)]))
    embeds = job.mm_inputs[0].placeholder.num_embeds
    scheduler = scheduler_of(one.runner, cache_embeds=embeds, host_bytes=0)
    answer(scheduler, one.runner, [job])
    warm = WarmSet(str(tmp_path), 1 << 20, namespace=b"n" * 16, traits=one.runner.traits)
    assert warm.save(scheduler.encoder, one.runner) == 1

    monkeypatch.setattr(traits, "runtime_version", lambda: "99.0.0")
    newer = traits.read_traits(one.runner.loaded)
    warm = WarmSet(str(tmp_path), 1 << 20, namespace=b"n" * 16, traits=newer)
    scheduler = scheduler_of(one.runner, cache_embeds=embeds, host_bytes=0)
    assert warm.load(scheduler.encoder, one.runner) == ([], [])


def test_a_file_gives_only_what_fits_the_model(tmp_path) -> None:
    store, path = EncoderStore(CPU), str(tmp_path / "part")
    for key, shape in ((b"a", (1, 4, 8)), (b"b", (1, 3, 8)), (b"c", (2, 4, 8)), (b"d", (1, 4, 6))):
        store.put(key, torch.randn(shape))
    store.put(b"e", torch.randn(1, 4, 8).bfloat16())
    assert store.save(path, [b"a", b"b", b"c", b"d", b"e", b"gone"]) == [
        b"a",
        b"b",
        b"c",
        b"d",
        b"e",
    ]
    other = EncoderStore(CPU)
    wanted = dict.fromkeys((b"a", b"b", b"c", b"d", b"e", b"gone"), 4)
    assert other.load(path, wanted, {}, (1, 8), torch.float32) == [b"a"]
    assert torch.equal(other.lookup(b"a"), load_file(path)[b"a".hex()])
    assert other.load(path, {}, {b"e": 4}, (1, 8), torch.bfloat16) == [b"e"]
    other.check_integrity()
    (tmp_path / "part").write_bytes(b"no safetensors")
    with pytest.raises(ValueError, match="header"):
        other.load(path, wanted, {}, (1, 8), torch.float32)
    with pytest.raises(OSError, match="nowhere"):
        store.save(str(tmp_path / "nowhere" / "part"), [b"a"])
