"""Settings of every test: Triton's interpreter, and the groups that workers of pytest-xdist run.

Without a GPU, Triton kernels run in Triton's interpreter. Triton decides that when it is first
imported, which anything that imports transformers may do, so it is set here, before any test
module. FOVEAL_DEVICE=cuda runs the model tests on a GPU instead.
"""

from __future__ import annotations

import gc
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.progress import FolderProgress, is_first, make_scheduler

if os.environ.get("FOVEAL_DEVICE", "cpu") == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_configure(config: pytest.Config) -> None:
    is_worker, is_verbose = hasattr(config, "workerinput"), config.option.verbose > 0
    if config.getoption("numprocesses", None) and not is_worker and not is_verbose:
        config.pluginmanager.register(FolderProgress(config))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: not is_first(item.nodeid))


def pytest_collection_finish(session: pytest.Session) -> None:
    """What imports and collecting made lives to the end: collections of garbage pass it over."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """A line for each reason to skip, in the file FOVEAL_NOT_RUN: `.ci/run` names them at its end.
    A test that runs nowhere would be as green as one that passes."""
    target = os.environ.get("FOVEAL_NOT_RUN")
    if target and not hasattr(config, "workerinput"):
        skipped = terminalreporter.stats.get("skipped", ())
        reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skipped)
        with Path(target).open("a", encoding="utf-8") as file:
            file.writelines(f"{count} tests: {reason}\n" for reason, count in reasons.items())


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """`--dist worksteal` and others are xdist's own: a file's tests then run in any worker."""
    return make_scheduler(config, log) if config.getoption("dist") == "load" else None
