"""Many requests from several frontends, drawn from a seed: tokens stay those of a straight run."""

import random

import pytest

from foveal_runtime.engine.testing.fake_frontend import FakeItem
from foveal_runtime.plan.config import EngineCaches
from foveal_runtime.plan.errors import MediaTooLarge
from tests.support.engine_core_rig import Engine, early_release


@pytest.mark.parametrize("run_ahead", ["off", "on"])
@pytest.mark.parametrize("seed", range(6))
def test_a_crowd_of_frontends_with_small_caches(seed, run_ahead):
    """Three frontends, more media than any cache holds, wrong media, aborts and lost sessions."""
    print("seed", seed)
    rng = random.Random(seed)
    caches = EngineCaches(
        ipc_bytes=rng.choice([0, 700, 2000]), ipc_staging_bytes=rng.choice([3000, 8000]),
        block_size=4, encoder_embeds=24, encoder_host_bytes=rng.choice([0, 2000]),
    )  # fmt: skip
    engine = Engine(caches=caches, num_blocks=50, run_ahead=run_ahead)
    items = [FakeItem(f"i{n}", 2 + 2 * n, 64 + 40 * n) for n in range(8)]
    names = ["f1", "f2", "f3"]
    for name in names:
        engine.connect(name)
    live, done = [], []
    for number in range(60):
        frontend = engine.frontends[rng.choice(names)]
        rid = (f"r{number}", 0)
        prompt = rng.choices([10, 11, *items], k=rng.randint(1, 4))
        try:
            sending = frontend.request(rid, [5, *prompt], max_tokens=rng.randint(1, 20))
        except MediaTooLarge:
            continue
        engine.up(frontend, sending)
        live.append((frontend, rid))
        for _ in range(rng.randint(0, 3)):
            engine.step()
        if rng.random() < 0.1:
            frontend, rid = live.pop(rng.randrange(len(live)))
            sending = frontend.sender.abort(rid)
            if sending is not None:
                engine.up(frontend, sending)
        if rng.random() < 0.1:
            engine.core.scheduler.forget_media([rng.choice(items).mm_hash])
        if rng.random() < 0.05:
            frontend = engine.frontends[rng.choice(names)]
            sid = frontend.sender.sid
            lost = frontend.sender.end_session("test")
            engine.core.on_session_lost(frontend.sender.frontend_id, sid, "test")
            live = [entry for entry in live if entry[0] is not frontend or entry[1] not in lost]
            engine.up(frontend, frontend.hello())
    engine.run()
    done = [(f, rid) for f, rid in live if f.finish.get(rid) == "length"]
    assert len(done) > 20
    for frontend, rid in done:
        engine.check(frontend, rid)
    for frontend, rid in live:
        assert rid in frontend.finish, f"{rid} was dropped silently: {frontend.over}"
    engine.assert_clean()


@pytest.mark.parametrize("run_ahead", ["off", "on"])
@pytest.mark.parametrize("seed", range(4))
def test_a_crowd_with_early_release(seed, run_ahead):
    """Tokens stay those of a straight computation, whatever is released, preempted and fetched."""
    print("seed", seed)
    rng = random.Random(seed)
    engine = early_release(ipc_bytes=900, num_blocks=33, run_ahead=run_ahead)
    frontends = [engine.connect(f"f{i}") for i in range(2)]
    items = [FakeItem(f"i{i}", rng.randrange(2, 13), rng.randrange(16, 200)) for i in range(9)]
    rids = []
    for number in range(60):
        frontend = rng.choice(frontends)
        parts = [rng.randrange(20, 60) for _ in range(rng.randrange(1, 12))]
        for item in rng.sample(items, rng.randrange(4)):
            parts.insert(rng.randrange(len(parts) + 1), item)
        rid = (f"r{number}", 0)
        engine.up(frontend, frontend.request(rid, parts, max_tokens=rng.randrange(1, 40)))
        rids.append((frontend, rid))
        for _ in range(rng.randrange(4)):
            engine.step()
        if rng.random() < 0.1:
            engine.core.receiver.reset()
        if rng.random() < 0.1:
            engine.core.scheduler.forget_media([rng.choice(items).mm_hash])
    engine.run(5000)
    assert engine.core.stats.num_preemptions > 0
    for frontend, rid in rids:
        assert frontend.finish[rid] == "length", frontend.errors.get(rid)
        engine.check(frontend, rid)
    engine.assert_clean()
