"""The simulator is the product in virtual time: same seed, same day; nothing lost; a control."""

import asyncio
import inspect
import random
import time
from itertools import accumulate

import msgspec
import pytest

from e2e.bench.simulation import limits
from e2e.bench.simulation import world as world_module
from e2e.bench.simulation.costs import FEATURES, CostRunner, Costs, Deployment, Role, fit
from e2e.bench.simulation.fleet import Day, FleetRouter, RoundRobin, live, shrunk
from e2e.bench.simulation.measure import pace_of, step_costs
from e2e.bench.simulation.steps import Steps, Timed
from e2e.bench.simulation.virtual import Cores, run
from e2e.bench.simulation.world import Ask, World, converse
from foveal_runtime.engine.process.core import EngineCore
from foveal_runtime.engine.scheduler.scheduler import Scheduler
from foveal_runtime.engine.types.step import (
    DoneStep,
    EncoderInput,
    ModelTraits,
    ScheduledRequest,
    StepPlan,
    StepResult,
)
from foveal_runtime.frontend.engines.client import EngineClient
from foveal_runtime.frontend.engines.routing import Router
from foveal_runtime.mirror.receiver import Receiver
from foveal_runtime.mirror.sender import Sender
from foveal_runtime.plan.budget.encoder import LargestItem
from foveal_runtime.plan.config import EngineCaches, EngineConfig, ModelConfig

ROLE = Role(0.002, 0.0002, 0.001, 0.002)
COSTS = Costs(
    step={"step": 0.003, "prompt_token": 5e-5, "stream": 3e-4, "embed": 4e-5},
    frontend=ROLE, worker=Role(0, 0, 0, 0.01), engine=ROLE, client=ROLE,
)  # fmt: skip
DEPLOYMENT = Deployment(
    engine=EngineConfig(model=ModelConfig(path="/nowhere"), caches=EngineCaches(ipc_bytes=1 << 20)),
    traits=ModelTraits(8192, 4096, (), True, embed_width=8, embed_bytes=32),
    num_blocks=800, max_model_len=1024, largest={"image": LargestItem(64, 64)}, item_tokens=64,
    item_bytes=20_000,
)  # fmt: skip
DAY = Day(requests=200, rate=6.0, catalogue=60)


def day(policy=FleetRouter, seed=1):
    small = shrunk(DEPLOYMENT, images=12, encoded=6, prompts=12)
    return live(
        small, COSTS, DAY, num_frontends=6, num_engines=3, num_clients=2, seed=seed, policy=policy
    )


@pytest.fixture(scope="module")
def routed():
    return day()


def mean(hours, cache):
    return sum(hour.hits[cache] * hour.requests for hour in hours) / sum(h.requests for h in hours)


def test_a_seed_is_a_day(routed):
    assert day() == routed
    assert sum(hour.requests for hour in routed) >= 100


def test_without_routing_by_cache_fewer_images_are_found(routed):
    """The control; it is another day, too, for the comparison above."""
    turned = day(RoundRobin)
    assert turned != routed
    for cache in ("ipc", "prefix"):  # three engines keep too few encoder outputs to tell
        assert mean(routed, cache) > mean(turned, cache) + 0.1, cache


@pytest.mark.extended  # seconds
def test_four_by_two_with_the_same_memory_is_within_two_points_of_one_by_one():
    """The value cache: C bytes at one engine, C / 2 at each of two. Before the load bound knew
    chance, this lost more than three points."""
    rng = random.Random(5)
    weights = list(accumulate(1 / rank**0.9 for rank in range(1, 401)))
    images = rng.choices(range(400), cum_weights=weights, k=1500)
    talks = [[Ask([1, 3, 100 + n], (image,), (5,))] for n, image in enumerate(images)]

    async def main(num_frontends, num_engines):
        small = shrunk(DEPLOYMENT, images=100 / num_engines, encoded=4, prompts=50)
        flat = Costs(step={"step": 0.002})
        async with World(small, flat, num_frontends, num_engines) as world:
            await converse(world, talks, 16)
            hits, queries = world.hits()["ipc"]
            return hits / queries

    one, many = run(main(1, 1)), run(main(4, 2))
    assert one > 0.5
    assert many >= one - 0.02, (one, many)


def test_every_request_ends_once_and_every_byte_is_accounted_for():
    talks = [[Ask([1, 3, 100 + n], (n % 5,), (5, 6, 7))] * 2 for n in range(12)]

    async def main():
        async with World(DEPLOYMENT, COSTS, 4, 2, cores=Cores(2)) as world:
            await converse(world, talks, 4)
            engines, clients = list(world.engines.values()), world.clients
            links = [link for client in clients for link in client.links()]
            assert [answer.num_tokens for answer in world.answers] == [3] * 24
            assert sum(sum(e.core.stats.finished.values()) for e in engines) == 24
            assert sum(client.stats.mm_queries[0] for client in clients) == 24
            assert not any(link.inflight for link in links)
            values = sum(sum(link.sender.stats.bytes_sent.values()) for link in links)
            sent = sum(one.counters.bytes_sent for e in engines for one in e.links.values())
            first_sights = {key for e in engines for key in e.core.receiver.store.announced()}
            assert values % len(world.item) == 0
            assert values >= len(first_sights) * len(world.item)
            assert values < sent < values + 24 * 1000 + 60_000
            for engine in engines:
                engine.core.check_integrity()

    run(main())


def test_what_runs_is_the_product():
    """Nothing of the parts that decide is written again here."""

    async def main():
        async with World(DEPLOYMENT, COSTS, 1, 1) as world:
            [engine], [client] = world.engines.values(), world.clients
            found = [client, client.router, client.links()[0].sender, engine.core,
                     engine.core.scheduler, engine.core.receiver]  # fmt: skip
            return found

    wanted = (EngineClient, Router, Sender, EngineCore, Scheduler, Receiver)
    for one, kind in zip(run(main()), wanted, strict=True):
        assert isinstance(one, kind)
        assert type(one).__module__.startswith("foveal_runtime.")
    for name, one in inspect.getmembers(world_module, inspect.isclass):
        if one.__module__ == world_module.__name__:
            assert not issubclass(one, wanted), name


def test_limits_are_those_of_the_product():
    """As docs/concepts/scale.md says; what costs twice as much breaks at half the size."""
    assert limits.sessions(342_400) == (8192, 10)
    assert limits.mirror_bytes(1000) > limits.mirror_bytes(0) + 1000 * 100

    def sizes(report_seconds):
        found = limits.Limits(
            mirror_bytes=2000, entry_bytes=300, report_engine_seconds=1e-5,
            report_frontend_seconds=report_seconds, choice_seconds={2: 1e-5, 200: 4e-4},
            max_sessions=256, num_windows=4,
        )  # fmt: skip
        points = limits.break_points(
            found, reports_per_second=20, entries=10_000, memory_bytes=1 << 30,
            requests_per_second=2,
        )  # fmt: skip
        assert [one.size for one in points] == sorted(one.size for one in points)
        return {one.what: one.size for one in points}

    reports = "load reports take a frontend's event loop"
    assert sizes(1e-4)[reports] == pytest.approx(500)
    assert sizes(2e-4)[reports] == pytest.approx(250)


def test_cores_are_shared():
    """Three tasks of a second on two cores take 1.5 s; one alone runs at its own speed."""

    async def main():
        cores, loop = Cores(2, alone_speed=2.0), asyncio.get_running_loop()
        await asyncio.gather(*(cores.work(1.0) for _ in range(3)))
        shared = loop.time()
        await cores.work(1.0)
        return shared, loop.time() - shared

    shared, alone = run(main())
    assert shared == pytest.approx(1.5)
    assert alone == pytest.approx(0.5)


def test_streams_go_on_in_the_middle_of_simulated_encoding():
    """As often as seconds say that the machine needs, not CPU seconds."""
    embeds = EncoderInput(b"k" * 32, 0, 100, b"")
    plan = StepPlan(1, encode=[embeds], slice_seconds=0.002)
    spent, turns = [], []
    runner = CostRunner(DEPLOYMENT.traits, COSTS, lambda name, index: 0, spent.append)
    runner.slowness = 2.0
    result = runner.submit(plan, lambda: turns.append(sum(spent))).result()
    assert turns == pytest.approx([0.001, 0.002, 0.003, 0.004])
    assert sum(spent) == pytest.approx(COSTS.step_seconds(plan))
    assert result.encode_seconds == pytest.approx(0.008)


def test_a_measured_step_is_without_what_went_on_in_its_middle(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "process_time", lambda: now[0])

    class Runner:
        def submit(self, plan, between=None):
            now[0] += 1.0
            if between is not None:
                between()
            now[0] += 2.0
            return DoneStep(StepResult(plan.step))

    timed = Timed(Runner())
    stream = [ScheduledRequest("r", 7, 1, [], True)]
    embeds = EncoderInput(b"k" * 32, 0, 100, b"")
    timed.submit(
        StepPlan(1, encode=[embeds], slice_seconds=0.1),
        lambda: timed.submit(StepPlan(2, scheduled=stream)),
    )
    assert timed.seconds == [3.0, 3.0]
    assert [row[FEATURES.index("embed")] for row in timed.rows] == [0.0, 100.0]


@pytest.mark.parametrize("num_clients", [0, 1])
def test_every_message_costs_the_frontend_that_reads_it(num_clients):
    """Frontends that share a client have no links of their own: nobody reads for them all."""
    talks = [[Ask([1, 3, 100 + n], (n,), (5, 6, 7))] for n in range(8)]
    costs = Costs(step={}, frontend=Role(message=0.001))

    async def main():
        cores = Cores()
        async with World(DEPLOYMENT, costs, 4, 2, cores=cores, num_clients=num_clients) as world:
            await converse(world, talks, 8)
            links = [link for engine in world.engines.values() for link in engine.links.values()]
            return cores.used_seconds, sum(link.counters.messages_received for link in links)

    used, count = run(main())
    assert count >= len(talks)
    assert used == pytest.approx(0.0 if num_clients else 0.001 * count)


def test_costs_are_found_again():
    """And a cost that would be negative is none."""
    true = [0.003, 0.002, 5e-5, 0.0, 3e-4, 0.0, 4e-5]
    rows = [[1.0, i % 5, 10.0 * i, 100.0 * i * i, i % 7, 50.0 * (i % 11), 64.0 * (i % 3)]
            for i in range(40)]  # fmt: skip
    seconds = [sum(a * b for a, b in zip(true, row, strict=True)) for row in rows]
    assert fit(rows, seconds) == pytest.approx(true, rel=1e-6, abs=1e-9)
    down = [[1.0, float(i)] for i in range(20)]
    assert fit(down, [1.0 - 0.01 * i for i in range(20)])[1] == 0.0
    assert len(true) == len(FEATURES)
    kept = msgspec.json.decode(msgspec.json.encode(COSTS), type=Costs)
    assert kept == COSTS


def test_what_disturbs_steps_is_part_of_their_costs():
    """Some take three times as long: the total is theirs."""
    rows = [[1.0, float(i % 10)] for i in range(200)]
    seconds = [(0.003 + 0.001 * (i % 10)) * (3 if i % 7 == 0 else 1) for i in range(200)]
    found = fit(rows, seconds)
    total = sum(a * b for row in rows for a, b in zip(found, row, strict=True))
    assert total == pytest.approx(sum(seconds), rel=1e-3)


def test_costs_follow_the_pace_of_the_machine():
    slow = COSTS.at_pace(1.5)
    assert slow.step == pytest.approx({name: 1.5 * value for name, value in COSTS.step.items()})
    assert slow.worker.new_item == pytest.approx(1.5 * COSTS.worker.new_item)
    assert slow.alone_speed == COSTS.alone_speed


def test_time_passes_while_a_real_runner_computes():
    """Otherwise no request would arrive during another's steps."""
    runner = CostRunner(DEPLOYMENT.traits, COSTS, lambda name, index: 5)

    async def main():
        async with World(DEPLOYMENT, Costs(step={}), 1, 1, runner=runner) as world:
            await converse(world, [[Ask([1, 100 + n], (), (5,) * 8)] for n in range(4)], 2)
            return [answer.done - answer.sent for answer in world.answers]

    assert min(run(main())) >= 8 * COSTS.step["step"]


def test_costs_are_without_the_pace_that_steps_had():
    """Ten seconds at half speed, in which prompts are longer, make no prompt token dearer."""

    def measured(lengths, pace, began):
        rows = [[1.0, 1.0, 10.0 * n, *([0.0] * (len(FEATURES) - 3))] for n in lengths]
        seconds = [pace * (0.002 + 1e-4 * row[2]) for row in rows]
        return Steps(DEPLOYMENT, rows, seconds, [began + 0.1 * i for i in range(len(rows))])

    lengths = random.Random(2).choices(range(1, 30), k=100)
    found = [measured(lengths, 1.0, 1e6), measured([n + 4 for n in lengths], 2.0, 1e6 + 20)]
    costs = step_costs(found, found)
    part = costs.step["step"] + costs.step["prompt"]
    assert costs.step["prompt_token"] == pytest.approx(0.05 * part, rel=0.01)
    slow, fast = pace_of(found, costs, 1e6 + 20), pace_of(found, costs, until=1e6 + 10)
    assert slow == pytest.approx(2 * fast, rel=0.02)
