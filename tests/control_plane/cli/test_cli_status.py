"""`foveal status`, `budget` and `wait`: texts, formats, exit codes."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml

from foveal_operator.cli import main as cli
from foveal_operator.cli.plan.render import plan_table
from foveal_operator.cli.status import command as cli_status
from foveal_operator.cli.status.view import budget_text, resource_table, status_text
from foveal_operator.cli.terminal import Style, visible_width
from foveal_operator.common.errors import ClusterAnswerError, TimeRanOut, UsageError
from foveal_operator.kube.reader import UnreachableError
from foveal_operator.testing.fake_reader import FakeReader
from tests.support.cluster_samples import (
    INFERENCES,
    NOW,
    conditions,
    failing,
    healthy,
    serving,
)
from tests.support.regenerate import planned, profile_for, wanted
from tests.support.samples import LEGAL

READY = """\
qwen in models  ready
serves hf://Qwen/Qwen2.5-VL-7B-Instruct on http://qwen.models.svc:8000/v1

CONDITION     STATUS  REASON     FOR
SpecAccepted  True    Accepted   5m
BudgetFits    True    Fits       5m
Available     True    Available  5m
Ready         True    Ready      5m

PODS      READY  UPDATED  DRAINING  WORKLOAD
frontend  2/2    2/2      0         Deployment/qwen-frontend
engine    2/2    2/2      0         StatefulSet/qwen-engine

CACHE       SIZE  FROM
ipc     4.00 GiB  Derived
kv     50.00 GiB  Derived
"""
BUDGET = """\
qwen in models

BUDGET             PLANNED   MEASURED        OFF   ITEMS  FROM     HOW
ipc               4.00 GiB   1.00 GiB     -75.0%  65,536  Derived  default
kv               50.00 GiB          -          -       -  Derived  what is left
enginePodMemory  20.00 GiB  20.25 GiB  101% used       -  Pinned   base + ipc + headroom

more than 15 % off the plan: ipc
"""


def run(command: str, reader: FakeReader, *more: str, **options: Any) -> int:
    arguments = cli.parser().parse_args([command, *more])
    function: Callable[..., int] = getattr(cli_status, f"run_{command}")
    return function(arguments, lambda _: reader, **options)


def test_status_of_a_ready_resource() -> None:
    assert status_text(serving(), NOW, Style()) == READY


def test_status_says_why_not_what_to_do_and_what_failed_last() -> None:
    text = status_text(failing(), NOW, Style())
    assert "qwen in models  not ready (Unschedulable)" in text
    assert "3 Insufficient nvidia.com/gpu. Free or add nodes" in text
    assert text.count("Insufficient") == 1, "Ready and Reconciling repeat it; once is enough"
    assert "revision aaa serves, bbb is on its way\nrollout: FreeFirst: no free device" in text
    assert (
        "LAST FAILURE  2h ago\n"
        "    qwen-engine-0 (engine): OOMKilled, exit code 137, memory peak 19.8GiB of 20Gi\n"
        "    Killed\n"
    ) in text


@pytest.mark.parametrize("width", [60, 80, 100, 120, 200])
def test_a_terminal_gets_no_line_that_is_too_wide(width: int) -> None:
    for color in (True, False):
        style = Style(is_terminal=True, width=width, color=color)
        for text in (status_text(failing(), NOW, style), budget_text(serving(), style)):
            assert all(visible_width(line) <= width for line in text.splitlines())


@pytest.mark.parametrize("width", [60, 80, 100, 120, 200])
def test_a_formula_is_never_cut_off(width: int) -> None:
    """Regression: on 80 columns a bar took the formulas' place, and they are why one looks."""
    inference, result = planned(LEGAL["gpu"])
    style = Style(is_terminal=True, width=width, color=True)
    text = plan_table(inference, profile_for(inference), result, wanted(LEGAL["gpu"]), style)
    assert all(visible_width(line) <= width for line in text.splitlines())
    flat = " ".join(re.sub(r"\x1b\[[0-9;]*m", "", text).split())
    formulas = [line.formula for place in result.places for line in place.lines
                if line.bytes or line.is_cache]  # fmt: skip
    assert [one for one in formulas if " ".join(one.split()) not in flat] == []


def test_pods_that_serve_and_are_too_old_are_explained() -> None:
    """Only conditions that do not hold had their message shown."""
    body = serving()
    text = "2 of 2 serve; more than one minor release behind the operator (0.3.0): e-0 (0.1.2)."
    old = {"type": "EnginesReady", "status": "True", "reason": "VersionSkew", "message": text}
    body["status"]["conditions"].append(old)
    assert "one minor release behind the operator" in status_text(body, NOW, Style())


def test_a_status_of_an_older_generation_is_marked() -> None:
    text = status_text(serving(observedGeneration=2), NOW, Style())
    assert "has not seen generation 3 yet: what follows is about generation 2." in text
    assert "NotYetSeen" in resource_table([serving(observedGeneration=2)], NOW, Style())


def test_a_resource_without_status_is_told() -> None:
    body = serving()
    del body["status"]
    assert "qwen in models  no status yet" in status_text(body, NOW, Style())
    assert "has not planned this resource yet" in budget_text(body, Style())


def test_all_resources_a_line_each() -> None:
    text = resource_table([serving(), failing()], NOW, Style())
    assert text == (
        "NAME  READY  REASON         FRONTENDS  ENGINES  IPC       KV         AGE\n"
        "qwen  True   Ready          2/2        2/2      4.00 GiB  50.00 GiB  3d\n"
        "qwen  False  Unschedulable  2/2        1/2      4.00 GiB  50.00 GiB  3d\n"
    )


def test_budget_shows_planned_beside_measured() -> None:
    assert budget_text(serving(), Style()) == BUDGET


def test_formats_for_programs(capsys: Any) -> None:
    assert run("status", healthy(), "qwen", "-o", "json") == 0
    body = json.loads(capsys.readouterr().out)
    assert body["current"] is True
    assert body["status"]["url"].startswith("http://qwen.models.svc")
    assert run("status", healthy(), "-o", "yaml") == 0
    assert yaml.safe_load(capsys.readouterr().out)[0]["metadata"]["name"] == "qwen"
    assert run("budget", healthy(), "qwen", "-o", "json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert rows[0] == {
        "name": "ipc", "plannedBytes": 4 << 30, "measuredBytes": 1 << 30,
        "differencePercent": -75.0, "items": 65536, "source": "Derived", "formula": "default",
    }  # fmt: skip


def test_a_name_that_is_not_there_says_which_are() -> None:
    with pytest.raises(
        ClusterAnswerError, match=r"no .* 'qwem' in namespace models; there is qwen"
    ):
        run("status", healthy(), "qwem")
    with pytest.raises(ClusterAnswerError, match="install Foveal's chart first"):
        run("status", FakeReader({}, "models"), "qwen")


# --- wait --------------------------------------------------------------------------------------
class Story(FakeReader):
    """A resource whose state changes with each look."""

    def __init__(self, *states: Any) -> None:
        super().__init__({INFERENCES: {"items": []}}, "models")
        self._states: Iterator[Any] = iter(states)

    def get(self, path: str, **query: str) -> Any:
        if path.endswith("/qwen"):
            self.answers[path] = next(self._states)
        return super().get(path, **query)


def wait(reader: FakeReader, *more: str) -> tuple[int, int]:
    """Exit code and number of seconds slept."""
    slept: list[float] = []
    code = run("wait", reader, "qwen", *more, sleep=slept.append, clock=lambda: sum(slept))
    return code, int(sum(slept))


def test_wait_until_ready_tells_each_change_once(capsys: Any) -> None:
    old = serving(observedGeneration=2)
    story = Story(old, failing(), failing(), UnreachableError("no answer"), serving())
    assert wait(story) == (0, 4)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "qwen: the operator has not seen this generation yet"
    assert lines[1].startswith("qwen: not Ready (Unschedulable): EnginesReady: qwen-engine-1")
    assert lines[2:] == ["qwen: no answer", "qwen: Ready (Ready)"]


def test_wait_ends_when_waiting_cannot_help() -> None:
    stalled = serving(conditions=conditions(Ready=("False", "BudgetMisfit", "x"),
                                            Stalled=("True", "BudgetMisfit", "x")))  # fmt: skip
    assert wait(Story(stalled)) == (1, 0)
    assert wait(Story(stalled, serving()), "--keep-waiting") == (0, 1)


def test_wait_for_other_conditions_and_for_deletion() -> None:
    assert wait(Story(failing()), "--for", "condition=Available") == (0, 0)
    assert wait(Story(serving(), None), "--for", "delete") == (0, 1)


@pytest.mark.parametrize("goal", ["ready", "condition=READY", "Ready=true", "Stalled=False"])
def test_wait_reads_conditions_as_kubectl_does(goal: str) -> None:
    assert wait(Story(failing(), serving()), "--for", goal) == (0, int(goal != "Stalled=False"))


def test_wait_for_a_condition_that_does_not_hold(capsys: Any) -> None:
    assert wait(Story(serving(), failing()), "--for", "ready=false") == (0, 1)
    assert capsys.readouterr().out.splitlines() == [
        "qwen: not Ready=False (Ready): every replica of this revision serves",
        "qwen: Ready=False (Unschedulable)",
    ]


def test_wait_refuses_what_never_comes() -> None:
    with pytest.raises(UsageError, match=r"--for Redy: there is no such condition; give delete or "
                       r"one of SpecAccepted, .*, Ready, "):  # fmt: skip
        wait(Story(), "--for", "Redy")
    with pytest.raises(UsageError, match="--for Ready=Yes: the status of a condition is True,"):
        wait(Story(), "--for", "Ready=Yes")


def test_wait_gives_up_in_time() -> None:
    with pytest.raises(TimeRanOut, match="qwen is not Ready after 2 s: not Ready"):
        wait(Story(*[failing()] * 5), "--timeout", "2s")
    with pytest.raises(TimeRanOut, match="qwen is not deleted after 0 s: still there"):
        wait(Story(serving()), "--for", "delete", "--timeout", "0")
    with pytest.raises(TimeRanOut, match="there is no condition CachesMirrored yet"):
        wait(Story(serving()), "--for", "CachesMirrored", "--timeout", "0")


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("90s", 90), ("1h30m", 5400), ("0", 0), ("500ms", 0.5)]
)
def test_times(text: str, seconds: float) -> None:
    assert cli_status.duration(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "5 m", "-1s", "1d"])
def test_no_times(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is no time; write 90s"):
        cli_status.duration(text)
