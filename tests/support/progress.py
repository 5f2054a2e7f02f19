"""Runs on several workers: groups of tests that stay together, and a line for each folder.

Used by tests/conftest.py for `make test` and `make test-all`, which run on pytest-xdist's workers.
The tests of a file run in one worker, so that its module fixtures start once; those of
tests/processes all in one, and first: they are the longest and share a started deployment.
"""

from __future__ import annotations

import time
from collections import Counter

import pytest

ONE_GROUP = ("tests/processes",)


def folder_of(nodeid: str) -> str:
    return nodeid.partition("::")[0].rpartition("/")[0]


def group_of(nodeid: str) -> str:
    """The unit that one worker runs: a folder of ONE_GROUP, else a file."""
    folder = folder_of(nodeid)
    return folder if folder in ONE_GROUP else nodeid.partition("::")[0]


def is_first(nodeid: str) -> bool:
    return folder_of(nodeid) in ONE_GROUP


def make_scheduler(config: pytest.Config, log: object) -> object:
    """The unit that one worker runs is `group_of`. (pytest-xdist 3.8 does not see groups that are
    marked, `--dist loadgroup`, under pytest 9.2.) Imported here: other runs need no xdist."""
    from xdist.scheduler import LoadScopeScheduling

    class GroupScheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return GroupScheduling(config, log)


class FolderProgress:
    """Writes a folder's line when the last of its tests has ended, and each failure at once."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.left: Counter[str] = Counter()
        self.counts: dict[str, Counter[str]] = {}
        self.since: dict[str, float] = {}

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self.left = Counter(folder_of(nodeid) for nodeid in ids)  # the same for each worker

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.since.setdefault(folder_of(nodeid), time.monotonic())

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: object) -> tuple[str, str, str] | None:
        """Counted as usual, without a dot."""
        if not isinstance(report, pytest.TestReport) or report.failed:
            return None
        if hasattr(report, "wasxfail"):
            return None
        if report.skipped:
            return "skipped", "", ""
        return ("passed" if report.when == "call" else ""), "", ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            self.counts.setdefault(folder_of(report.nodeid), Counter())[report.outcome] += 1

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        folder = folder_of(nodeid)
        self.left[folder] -= 1
        if self.left[folder] == 0:
            counts = self.counts.get(folder, Counter())
            said = ", ".join(f"{number} {outcome}" for outcome, number in sorted(counts.items()))
            seconds = time.monotonic() - self.since[folder]
            terminal = self.config.pluginmanager.get_plugin("terminalreporter")
            terminal.ensure_newline()
            terminal.write_line(f"{folder:<40} {said} in {seconds:.0f} s")
