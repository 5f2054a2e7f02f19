"""The engine's series: every declared engine family that this room owns, with the right numbers."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from foveal_runtime.engine.process.assemble import LoadedEngine, assemble_core
from foveal_runtime.engine.process.metrics import EngineMetrics
from foveal_runtime.engine.testing.drive import FakeClock
from foveal_runtime.engine.testing.fake_frontend import FakeFrontend, FakeItem
from foveal_runtime.engine.testing.fake_runner import FakeRunner
from foveal_runtime.plan.budget.encoder import LargestItem
from foveal_runtime.plan.config import EngineCaches, EngineConfig, ModelConfig
from foveal_runtime.plan.metrics import METRICS
from foveal_runtime.telemetry.metrics import Metrics
from foveal_runtime.telemetry.startup import StartPhases
from foveal_runtime.wire import codec
from tests.support.engine_core_rig import A, Engine

# Exported by others: start-up code or the model layer.
NOT_HERE = {
    "foveal_budget_bytes",
    "foveal_events_published",
    "foveal_engine_errors",
    "foveal_memory_limit_bytes",
    "foveal_memory_page_cache_bytes",
    "foveal_memory_peak_bytes",
    "foveal_memory_used_bytes",
    "foveal_mirror_rejects",
    "foveal_startup_seconds",
}


@pytest.fixture
def samples():
    clock, sent = FakeClock(), []
    config = EngineConfig(
        model=ModelConfig(path="/m"),
        caches=EngineCaches(ipc_bytes=8000, ipc_staging_bytes=9000, block_size=4),
    )
    windows = {"num_window_blocks": 32, "window": 6}
    loaded = LoadedEngine(
        runner=FakeRunner(num_blocks=64, block_size=4, **windows), num_blocks=64, max_model_len=100,
        largest={"image": LargestItem(24, 24)}, **windows,
    )  # fmt: skip
    core = assemble_core(config, loaded, send=lambda fid, m: sent.append(m), clock=clock)
    metrics = Metrics("engine", model_name="m", process="engine-0", engine="engine-0")
    metrics.add_source(EngineMetrics(core).collect)
    metrics.add_source(StartPhases().collect)
    frontend, item = FakeFrontend("f1"), FakeItem("A", 6)

    def up(sending):
        frames = [memoryview(bytes(frame)) for frame in codec.encode_up(sending)]
        message = codec.decode_up(frames)
        core.on_message("f1", message, codec.open_values(message, frames))
        while core.has_work:
            core.step()
            clock.now += 0.5
        core.flush()
        while sent:
            frontend.take(sent.pop(0))

    up(frontend.hello())
    for number in range(3):
        up(frontend.request((f"r{number}", 0), [1, item, 2, 3, number], max_tokens=5))
    metrics.exposition()  # a second scrape must not count observations twice
    found = {}
    for family in text_string_to_metric_families(metrics.exposition().decode()):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in ("model_name", "process")}
            found[sample.name, tuple(sorted(labels.items()))] = sample.value
    return found


def test_every_engine_family_of_this_room_is_exported(samples):
    names = {name for name, _ in samples}
    for metric in METRICS:
        if "engine" in metric.roles and metric.name not in NOT_HERE:
            suffix = {"counter": "_total", "histogram": "_count", "gauge": ""}[metric.kind]
            assert metric.name + suffix in names, metric.name


def test_the_numbers(samples):
    def value(name, **labels):
        return samples[name, tuple(sorted(labels.items()))]

    def of(name, **labels):
        return value(name, engine="engine-0", **labels)

    assert of("vllm:prompt_tokens_total") == 30
    assert of("vllm:prompt_tokens_cached_total") == 16
    assert of("vllm:prefix_cache_queries_total") == 30
    assert of("vllm:prefix_cache_hits_total") == 16
    assert of("vllm:generation_tokens_total") == 15
    assert of("vllm:iteration_tokens_total_count") == 15
    assert of("vllm:iteration_tokens_total_sum") == 10 + 2 + 2 + 12
    assert of("vllm:num_requests_running") == 0
    assert of("vllm:kv_cache_usage_perc") == 0
    # Frontends count queries and hits of values; here they would be counted a second time.
    assert not any(("cache", "ipc") in labels for name, labels in samples if "_hits" in name)
    assert not any(("cache", "ipc") in labels for name, labels in samples if "_queries" in name)
    assert value("foveal_cache_entries", cache="ipc", tier="host") >= 1
    ratio = "foveal_cache_estimated_hit_ratio"
    assert value(ratio, cache="ipc", factor="1") == pytest.approx(2 / 3)
    assert value(ratio, cache="kv", factor="0.5") == pytest.approx(4 / 6)
    assert value(ratio, cache="encoder", factor="4") == 0
    encoder = {"cache": "encoder", "modality": "image", "tier": "device"}
    assert value("foveal_cache_queries_total", **encoder) == 1
    assert value("foveal_encoder_items_total", modality="image") == 1
    assert value("foveal_encoder_embeds_total") == 6
    assert value("foveal_encoder_cache_embeds", state="freeable") == 6
    assert value("foveal_engine_finished_total", reason="length") == 3
    assert value("foveal_kv_blocks", state="active") == 0
    assert value("foveal_kv_blocks", state="cached") == 5
    states = [value("foveal_kv_window_blocks", state=s) for s in ("active", "cached", "free")]
    assert states == [0, 5, 26]
    gone = {"cache": "kv-window", "tier": "device", "reason": "room"}
    assert value("foveal_cache_evictions_total", **gone) == 0
    assert value("foveal_engine_residence_seconds_count") == 3
    assert value("foveal_mirror_sessions") == 1


def saved_seconds(metrics: Metrics) -> dict[str, float]:
    return {
        sample.labels["cache"]: sample.value
        for family in text_string_to_metric_families(metrics.exposition().decode())
        for sample in family.samples
        if sample.name == "foveal_cache_saved_seconds_total"
    }


def test_saved_seconds_never_fall_when_work_becomes_cheaper():
    """They were the average cost so far times all hits: a counter that fell looks like a restart,
    and Prometheus adds all of it once more."""
    engine = Engine()
    metrics = Metrics("engine", model_name="m", process="engine-0", engine="engine-0")
    metrics.add_source(EngineMetrics(engine.core).collect)
    frontend = engine.connect()

    def ask(name, *rest):
        engine.up(frontend, frontend.request((name, 0), [1, A, 2, 3, 4, *rest]))
        engine.run()

    ask("first")
    engine.core.scheduler.reset_prefix_cache()
    ask("encoder hit")
    ask("prefix hit")
    engine.core.stats.encode_seconds[0] += 6.0
    engine.core.stats.prefill_seconds += 100.0
    before = saved_seconds(metrics)
    assert before["encoder"] > 1
    assert before["kv"] > 1
    engine.core.stats.count_encoded(0, 1_000_000, 0.0)
    engine.core.stats.num_prefill_tokens += 1_000_000
    assert saved_seconds(metrics) == before
    engine.core.scheduler.reset_prefix_cache()
    ask("another encoder hit")
    ask("another prefix hit")
    after = saved_seconds(metrics)
    assert before["encoder"] < after["encoder"] < before["encoder"] + 0.01
    assert before["kv"] < after["kv"] < before["kv"] + 0.01
