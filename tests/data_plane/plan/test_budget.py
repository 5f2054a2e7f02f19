"""The budgets' worked examples, refusals with numbers, and what Shrink does."""

from __future__ import annotations

import msgspec
import pytest

from foveal_runtime.plan.budget.planner import headroom_of, plan
from foveal_runtime.plan.budget.types import BudgetInputs
from foveal_runtime.plan.config import GIB, MIB, ModalitiesConfig, ModalityLimits
from foveal_runtime.plan.profile import ItemProfile, ModelProfile, ProcessMemory
from tests.support.budget_samples import (
    TEXT,
    TOY,
    VLM,
    cpu,
    free_bytes,
    gpu,
    reasons,
    with_frontend,
)


def test_neither_limit_nor_sizes_gives_the_defaults_and_the_limits_follow() -> None:
    """Example 1: 4 GiB per frontend process, 4 GiB per engine; limits are derived above them."""
    result = plan(with_frontend(gpu(), processes=3), VLM)
    assert result.fits
    assert result.processor_bytes == 4 * GIB
    assert result.frontend.line("processor").bytes == 3 * 4 * GIB
    assert result.ipc_bytes == 4 * GIB
    assert result.frontend.source == result.engine.source == "Derived"
    for place in (result.frontend, result.engine):
        assert 0 <= free_bytes(place) < 2 * MIB


def test_a_given_limit_is_shared_by_the_caches() -> None:
    """Example 2: 16 GiB for a pod of two processes: each cache gets half of what is left."""
    result = plan(with_frontend(gpu(), processes=2, limit_bytes=16 * GIB), VLM)
    frontend = result.frontend
    others = frontend.used_bytes - frontend.line("processor").bytes
    left = 16 * GIB - headroom_of(16 * GIB, 10) - others
    assert left // 2 - 2 * MIB < result.processor_bytes <= left // 2
    assert frontend.line("processor").formula == (
        "what frontend.hostMemory leaves, for each of 2 processes"
    )


def test_grammars_have_their_bytes_on_every_rank() -> None:
    """A profile of before, which does not record the vocabulary, plans as it did."""
    assert not [line for line in plan(gpu(), VLM).engine.lines if line.name == "grammars"]
    wide = msgspec.structs.replace(VLM, vocab_size=150_000)
    for inputs in (gpu(), gpu(num_devices=2)):
        line = plan(inputs, wide).engine.line("grammars")
        seqs = inputs.engine.max_num_seqs
        assert line.each_bytes == 64 * MIB + seqs * MIB // 2 + 150_000 * 1200
        assert line.count == inputs.engine.num_devices
        assert f"{seqs} requests" in line.formula
    embeds = plan(gpu(generates=False), wide)
    assert not [line for line in embeds.engine.lines if line.name == "grammars"]


def test_on_a_cpu_streams_may_go_on_beside_an_encoder() -> None:
    image = ItemProfile(num_tokens=600, num_embeds=576, processed_bytes=MIB, num_patches=1024)
    model = msgspec.structs.replace(
        VLM, items={"image": image}, activation_bytes=64 * MIB,
        encoder_bytes_per_patch={"image": MIB},
    )  # fmt: skip
    step = 64 * MIB + cpu().engine.max_num_seqs * model.activation_bytes_per_token
    encoders = plan(gpu(), model).device.line("activations").bytes
    assert encoders > GIB
    assert plan(cpu(), model).engine.line("activations").bytes == encoders + step


def test_weights_that_are_cast_before_they_are_quantised_are_staged_whole() -> None:
    cast = msgspec.structs.replace(TEXT, quantization="int4, at load", load_bytes=7 * GIB)
    for inputs in (gpu(), cpu()):
        assert plan(inputs, cast).engine.line("loadStaging").bytes == 7 * GIB


def test_given_sizes_derive_the_limit() -> None:
    """Example 3: pinned 1 GiB and 2 GiB; the limits follow and nothing else moves."""
    base = plan(gpu(), VLM)
    result = plan(with_frontend(gpu(ipc_bytes=2 * GIB), processor_bytes=GIB), VLM)
    assert (result.processor_bytes, result.ipc_bytes) == (GIB, 2 * GIB)
    assert result.frontend.line("processor").source == "Pinned"
    assert result.engine.limit_bytes < base.engine.limit_bytes
    assert free_bytes(result.frontend) < 2 * MIB


def test_on_a_cpu_ipc_and_kv_share_the_host_limit_equally() -> None:
    """Example 4: engine.hostMemory 16 GiB on a CPU; both pools grow alike above their floors."""
    result = plan(cpu(limit_bytes=16 * GIB), TOY)
    assert result.device is None
    ipc, kv = result.engine.line("ipc").bytes, result.engine.line("kv").bytes
    assert abs(ipc - kv) < 4 * MIB
    assert ipc > 6 * GIB


def test_recurrent_state_of_all_running_requests_is_set_aside() -> None:
    """KV and snapshots of a hybrid model share what is left, two to one."""
    hybrid = msgspec.structs.replace(VLM, state_bytes=50 * MIB)
    plain, result = plan(gpu(), VLM), plan(gpu(), hybrid)
    assert result.device is not None
    assert plain.device is not None
    device, snapshots = result.device, result.device.line("snapshots")
    assert device.line("state").bytes == 128 * 50 * MIB
    shared = device.line("kv").bytes + snapshots.bytes
    assert abs(plain.device.line("kv").bytes - shared - 128 * 50 * MIB) <= 52 * MIB
    assert 0.3 * shared < snapshots.bytes <= shared / 3  # KV has one longest request first
    assert (snapshots.num_items, snapshots.unit) == (snapshots.bytes // (50 * MIB), "states")
    assert result.snapshot_bytes == snapshots.bytes
    assert all(line.name not in ("state", "snapshots") for line in plain.device.lines)
    assert plain.snapshot_bytes == 0


def test_an_encoder_keeps_kv_for_two_steps() -> None:
    encoder = msgspec.structs.replace(TEXT, is_encoder=True, max_model_len=512)
    step = 2048 // 16 + 128  # each of 128 prompts may end inside a block
    embeds = [
        gpu(generates=False),
        cpu(generates=False),
        cpu(limit_bytes=32 * GIB, generates=False),
    ]
    for inputs in embeds:
        result = plan(inputs, encoder)
        assert result.fits
        assert result.kv_tokens == 2 * step * 16
        assert plan(inputs, TEXT).kv_tokens > 10 * result.kv_tokens
    problem = plan(gpu(num_devices=2, generates=False), encoder).problems[0]
    assert (problem.reason, problem.available) == ("DeviceCount", 1)
    assert "an encoder cannot be shared" in problem.detail


def test_an_encoder_takes_what_one_step_computes_and_generates_nothing() -> None:
    encoder = msgspec.structs.replace(TEXT, is_encoder=True, max_model_len=8192)
    assert plan(gpu(generates=False), encoder).max_model_len == 2048
    more = gpu(generates=False, max_num_batched_tokens=16384)
    assert plan(more, encoder).max_model_len == 8192
    problem = plan(gpu(), encoder).problems[0]
    assert problem.reason == "EncoderTask"
    assert "set model.task to Embed" in problem.detail


def test_without_prefix_caching_nothing_is_set_aside_for_snapshots() -> None:
    hybrid = msgspec.structs.replace(VLM, state_bytes=50 * MIB)
    inputs = gpu(prefix_caching=False)
    result = plan(inputs, hybrid)
    assert result.snapshot_bytes == 0
    assert result.kv_bytes > plan(gpu(), hybrid).kv_bytes


def test_snapshots_have_a_default_where_nothing_limits_them() -> None:
    hybrid = msgspec.structs.replace(TOY, state_bytes=MIB)
    result = plan(cpu(), hybrid)
    assert result.fits
    assert result.snapshot_bytes == 2 * 128 * MIB


def test_defaults_are_clipped_to_the_node() -> None:
    """Example 5: a laptop with 6 GiB: the defaults shrink to what the node has, and say so."""
    result = plan(msgspec.structs.replace(cpu(), node_bytes=6 * GIB), TOY)
    assert result.fits
    assert result.frontend.limit_bytes == 6 * GIB
    assert result.processor_bytes < 4 * GIB
    assert any("clipped" in note for note in result.notes)


def test_the_device_gives_kv_the_remainder() -> None:
    """Example 6: 24 GiB less 10 %, 15 weights, 1.19 activations, 0.22 encoder: 4.44 to KV."""
    device = plan(gpu(24 * GIB), VLM).device
    assert device is not None
    assert device.line("encoder").num_items == 32_764
    assert device.line("encoder").bytes == 32_764 * 3584 * 2
    assert 4.4 * GIB < device.line("kv").bytes < 4.5 * GIB
    assert device.line("kv").num_items == device.line("kv").bytes // (16 * 57_344)


def test_deepstack_levels_multiply_the_encoder_cache() -> None:
    """40,960 bytes a token for 5120 wide, bf16, one output and three deepstack levels."""
    profile = msgspec.structs.replace(VLM, embed_width=5120, embed_levels=4)
    assert profile.bytes_per_embed == 40_960
    device = plan(gpu(), profile).device
    assert device is not None
    assert device.line("encoder").bytes == 32_764 * 40_960


def test_the_encoder_cache_is_for_one_requests_media_where_memory_allows() -> None:
    """16 images would be 262,144 outputs: 32,767 tokens of context bound them to 32,764. A tight
    device gives an eighth of what KV would get, at least the largest item; a pin is a pin."""
    roomy, tight = plan(gpu(24 * GIB), VLM), plan(gpu(21 * GIB), VLM)
    one = plan(msgspec.structs.replace(gpu(), modalities=_images(1)), VLM)
    assert roomy.encoder_embeds == 32_764
    assert roomy.device is not None
    assert roomy.device.line("encoder").formula.startswith("one request's media = 32764 embeds")
    assert tight.fits
    assert 16_384 < tight.encoder_embeds < 32_764
    assert tight.device is not None
    line, kv = tight.device.line("encoder"), tight.device.line("kv")
    assert line.formula.startswith("as memory allows of one request's 32764 = ")
    floor = 32_768 * 57_344
    assert 7 * (line.bytes - 16_384 * 7168) <= kv.bytes - floor + 2 * MIB
    assert one.encoder_embeds == 16_384
    assert one.device is not None
    assert one.device.line("encoder").formula.startswith("one request's media = 16384 embeds")
    assert plan(gpu(24 * GIB, encoder_embeds=20_000), VLM).encoder_embeds == 20_000


def _images(most: int) -> ModalitiesConfig:
    off = ModalityLimits(max_per_prompt=0)
    return ModalitiesConfig(image=ModalityLimits(max_per_prompt=most), video=off, audio=off)


def test_two_devices_halve_weights_and_share_kv() -> None:
    two = plan(gpu(16 * GIB, num_devices=2), VLM)
    assert two.fits
    assert two.device is not None
    assert two.device.line("weights").bytes == -(-15 * GIB // 2)
    assert two.kv_bytes == pytest.approx(2 * two.device.line("kv").bytes, abs=MIB)
    assert two.kv_tokens >= VLM.max_model_len


def test_a_text_model_gets_no_multimodal_cache() -> None:
    result = plan(gpu(16 * GIB), TEXT)
    assert result.fits
    assert (result.processor_bytes, result.ipc_bytes, result.encoder_embeds) == (0, 0, 0)
    assert result.encoder_compute_embeds == 0


def test_all_modalities_off_warns_and_keeps_no_encoder_cache() -> None:
    inputs = gpu()
    off = {
        name: msgspec.structs.replace(getattr(inputs.modalities, name), max_per_prompt=0)
        for name in ("image", "video")
    }
    modalities = msgspec.structs.replace(inputs.modalities, **off)
    result = plan(msgspec.structs.replace(inputs, modalities=modalities), VLM)
    assert result.fits
    assert result.encoder_embeds == 0
    assert "every modality is switched off" in result.notes[0]


def test_measured_costs_say_so() -> None:
    device = plan(gpu(), msgspec.structs.replace(VLM, source="measured")).device
    assert device is not None
    assert device.line("weights").source == "Measured"


def test_what_the_profile_measured_takes_the_place_of_constants() -> None:
    """And says so; what serving takes comes on top."""
    taken = ProcessMemory(
        http_bytes=80 * MIB, worker_bytes=460 * MIB, worker_bytes_per_pixel=16,
        engine_bytes=500 * MIB,
    )  # fmt: skip
    inputs = with_frontend(cpu(), processes=3, media_workers=2)
    result = plan(inputs, msgspec.structs.replace(TOY, processes=taken))
    base = result.frontend.line("base")
    assert (base.each_bytes, base.count, base.source) == (116 * MIB, 4, "Measured")
    worker = result.frontend.line("mediaWorkers")
    assert (worker.source, worker.count) == ("Measured", 3)  # each process has one of its own
    assert worker.each_bytes == 460 * MIB + -(-64_000_000 * 16 // MIB) * MIB
    # A sound of two hours decoded is more than any picture.
    audio = msgspec.structs.replace(inputs.modalities.audio, max_seconds=7200.0)
    hours = msgspec.structs.replace(
        inputs, modalities=msgspec.structs.replace(inputs.modalities, audio=audio)
    )
    sound = {"audio": TOY.items["image"]}
    longer = plan(hours, msgspec.structs.replace(TOY, processes=taken, items=sound))
    decoded = 7200 * 48_000 * 4 + 2 * 27_648
    worker = longer.frontend.line("mediaWorkers")
    assert worker.each_bytes == 460 * MIB + -(-decoded // MIB) * MIB
    assert result.engine.line("base").bytes == 548 * MIB
    assert plan(inputs, TOY).engine.line("base").source == "Derived"


def test_an_engine_on_a_cpu_starts_with_the_largest_image() -> None:
    """What that takes counts only as far as it exceeds what is idle at the start."""
    taken = ProcessMemory(worker_bytes_per_pixel=50)
    engine = plan(cpu(), msgspec.structs.replace(TOY, processes=taken)).engine
    idle = engine.line("ipcStaging").bytes + engine.line("activations").bytes
    assert engine.line("loadStaging").bytes == -(-64_000_000 * 50 // MIB) * MIB - idle
    assert plan(cpu(), TOY).engine.line("loadStaging").bytes == TOY.weight_bytes // 4


def test_admitted_media_count_as_text_and_as_bytes() -> None:
    inputs = with_frontend(gpu(), max_media_bytes=32 * MIB, max_body_bytes=4 * MIB, processes=2)
    media = plan(inputs, VLM).frontend.line("media")
    assert media.each_bytes == 56 * MIB + 8 * MIB
    assert media.count == 2
    # a body larger than all that is admitted is let in alone
    alone = with_frontend(gpu(), max_media_bytes=MIB, max_body_bytes=4 * MIB)
    assert plan(alone, VLM).frontend.line("media").bytes == 7 * MIB + 8 * MIB


REFUSED: list[tuple[str, BudgetInputs, ModelProfile, str]] = [
    ("DeviceMemory", gpu(16 * GIB), VLM, "engine.accelerator.count to 2"),
    ("DeviceMemoryUnknown", gpu(0), VLM, "engine.accelerator.memory"),
    ("EncoderTooSmall", gpu(encoder_embeds=100), VLM, "caches.encoder.tokens to 16384"),
    ("EncoderTooSmall", gpu(encoder_bytes=MIB), VLM, "caches.encoder.size to 112Mi"),
    ("ChunkedInputOff", gpu(disable_chunked_mm_input=True), VLM, "MultiModalInput to false"),
    ("ContextTooShort", gpu(max_model_len=9000), VLM, "engine.maxModelLen to 16387"),
    ("ContextTooLong", gpu(max_model_len=99_999), VLM, "engine.maxModelLen to 32768"),
    ("KVTooSmall", gpu(kv_bytes=GIB), VLM, "caches.kv.size to Auto"),
    ("EngineMemory", gpu(limit_bytes=2 * GIB), VLM, "engine.hostMemory"),
    ("EngineMemory", gpu(limit_bytes=8 * GIB, ipc_bytes=6 * GIB), VLM, "caches.ipc.size"),
    ("EngineMemory", cpu(limit_bytes=2 * GIB), TEXT, "engine.hostMemory"),
    ("FrontendMemory", with_frontend(gpu(), limit_bytes=2 * GIB), VLM, "frontend.hostMemory"),
    (
        "FrontendMemory",
        with_frontend(gpu(), limit_bytes=10 * GIB, processes=2, processor_bytes=4 * GIB),
        VLM,
        "caches.processor.size",
    ),
    (
        "NodeMemory",
        msgspec.structs.replace(gpu(limit_bytes=64 * GIB), node_bytes=32 * GIB),
        VLM,
        "engine.hostMemory to 32Gi",
    ),
]


@pytest.mark.parametrize(("reason", "inputs", "profile", "edit"), REFUSED)
def test_what_cannot_run_is_refused_with_figures_and_edits(
    reason: str, inputs: BudgetInputs, profile: ModelProfile, edit: str
) -> None:
    result = plan(inputs, profile)
    assert reason in reasons(result)
    problem = next(p for p in result.problems if p.reason == reason)
    assert problem.needed > problem.available
    assert edit in problem.message


def test_the_message_names_term_figures_and_two_edits() -> None:
    inputs = with_frontend(gpu(), limit_bytes=10 * GIB, processes=2, processor_bytes=4 * GIB)
    (problem,) = plan(inputs, VLM).problems
    assert problem.term == "processor"
    assert len(problem.edits) == 2
    assert problem.message.startswith(
        "The memory limit of a frontend pod is 10.00 GiB, of which 9.00 GiB is usable (10 % "
        "headroom). At least 12.92 GiB is needed: 3.92 GiB too little. Largest items: "
        "processor 8.00 GiB, "
    )


def test_shrink_reduces_in_the_documented_order_and_says_so() -> None:
    """Host tier first, then the IPC pool; what is not needed stays."""
    pinned = gpu(limit_bytes=9 * GIB, ipc_bytes=4 * GIB, encoder_host_bytes=GIB)
    assert reasons(plan(pinned, VLM)) == ["EngineMemory"]
    result = plan(msgspec.structs.replace(pinned, on_misfit="Shrink"), VLM)
    assert result.fits
    assert result.encoder_host_bytes == 0
    assert GIB < result.ipc_bytes < 4 * GIB
    assert result.engine.line("ipc").source == "Shrunk"
    assert "engine: onMisfit Shrink reduced encoderHost, ipc to fit" in result.notes


def test_shrink_cannot_go_below_what_the_software_needs() -> None:
    inputs = msgspec.structs.replace(gpu(16 * GIB), on_misfit="Shrink")
    assert reasons(plan(inputs, VLM)) == ["DeviceMemory"]


def test_items_larger_than_a_pinned_cache_are_noted() -> None:
    result = plan(with_frontend(gpu(ipc_bytes=0), processor_bytes=0), VLM)
    assert result.fits
    assert len(result.notes) == 2
