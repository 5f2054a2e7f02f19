"""When a request that keeps losing its engines is given up: deaths count, broken links do not."""

import pytest

from foveal_runtime.frontend.engines.run import MAX_ATTEMPTS, MAX_LOSSES, EngineRun
from foveal_runtime.frontend.items.prepared import PreparedRequest
from foveal_runtime.plan.errors import EngineFailure
from foveal_runtime.plan.sampling import SamplingParams


def make_run() -> EngineRun:
    return EngineRun(PreparedRequest("r", [1, 2], [], [], SamplingParams(max_tokens=4)))


def lose(run: EngineRun, *engines: tuple[str, int]) -> None:
    for endpoint, boot in engines:
        run.attempt += 1
        run.on_lost(endpoint, boot)


def test_an_engine_is_lost_once_however_often_its_link_breaks():
    """Regression: each cut of a link that was still down counted as one more dead engine, so two
    engines whose links flapped were enough to fail a request."""
    run = make_run()
    lose(run, *[("a", 1), ("b", 1)] * 5)
    assert len(run.suspects) == 2
    assert run.settle(lambda *_: "alive")
    assert run.num_deaths == 0
    lose(run, ("a", 1), ("b", 1))
    assert run.settle(lambda _, life, lost_at: "dead" if life[0] == "a" else "alive")
    assert run.num_deaths == 1


def test_every_boot_is_a_life():
    run = make_run()
    for boot in range(1, MAX_LOSSES):
        lose(run, ("a", boot))
        assert run.settle(lambda *_: "dead")
    lose(run, ("a", MAX_LOSSES))
    with pytest.raises(EngineFailure, match=f"{MAX_LOSSES} engines died"):
        run.settle(lambda *_: "dead")


def test_no_more_engines_are_risked_while_their_fate_is_unknown():
    run = make_run()
    lose(run, *[(name, 1) for name in "ab"])
    assert not run.settle(lambda *_: "unknown")
    assert run.settle(lambda _, life, lost_at: "alive" if life[0] == "a" else "unknown")
    lose(run, ("c", 1))
    assert not run.settle(lambda *_: "unknown")


def test_attempts_have_an_end_and_come_slower_and_slower():
    run = make_run()
    total_seconds = 0.0
    while run.attempt < MAX_ATTEMPTS:
        assert run.settle(lambda *_: "alive")
        lose(run, ("a", 1))
        total_seconds += run.pause_seconds
    with pytest.raises(EngineFailure, match="was interrupted"):
        run.settle(lambda *_: "alive")
    assert total_seconds > 50
