"""Where `foveal dashboard` writes its page, and when it reads: links, pipes, a clock set back."""

from __future__ import annotations

import errno
import itertools
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from foveal_operator.cli import main as cli
from foveal_operator.cli.dashboard import sources
from foveal_operator.cli.dashboard.command import run
from foveal_operator.common.errors import UsageError
from tests.support import metric_samples


@pytest.fixture(autouse=True)
def metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    text = metric_samples.exposition(next(metric_samples.scrapes(1))[1])
    monkeypatch.setattr(sources, "get", lambda url, token="": text.encode())


def dashboard(out: Path) -> int:
    words = ["dashboard", "--metrics", "http://127.0.0.1:9/metrics", "--since", "2"]
    arguments = cli.parser().parse_args([*words, "--out", str(out)])
    return run(arguments, sleep=lambda _: None)


def test_a_link_or_a_pipe_is_written_and_stays_one(tmp_path: Path) -> None:
    page, link, pipe = tmp_path / "page.html", tmp_path / "link.html", tmp_path / "pipe"
    link.symlink_to(page)
    assert dashboard(link) == 0
    assert link.is_symlink()
    assert "</html>" in page.read_text()
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    assert dashboard(pipe) == 0
    assert pipe.is_fifo()
    reader.join()
    assert "</html>" in read[0]


def test_a_page_that_cannot_be_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(UsageError, match=r"cannot write .*page\.html: No space left"):
        dashboard(tmp_path / "page.html")
    assert list(tmp_path.iterdir()) == []


def test_a_clock_that_is_set_back_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count(1_790_000_000.0, -3600.0)
    times = SimpleNamespace(time=lambda: next(clock), monotonic=itertools.count(7.0).__next__)
    monkeypatch.setattr("foveal_operator.cli.dashboard.run.time", times)
    assert dashboard(tmp_path / "page.html") == 0
    assert "14:13" in (tmp_path / "page.html").read_text(), "the time at the start, in UTC"
