"""How long a person waits for the line that answers a mistake: `foveal serve` as a program.

    python -m e2e.bench.micro.refusals

Every mistake of tests/support/mistakes.py, a taken port, too little memory, and a hub on the
loopback that refuses. Limit: one second where nothing need be loaded. The time of a core is what a
quiet machine would need; on one that is busy the seconds are longer.
"""

from __future__ import annotations

import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.checkpoint_files import CONFIG, checkpoint, write_profile
from tests.support.mistakes import FILES, OPTIONS
from tests.support.model_hub import Hub

PROGRAM = Path(sys.executable).with_name("foveal")
ROUNDS = 3


class Mistake(NamedTuple):
    """`seconds` and `core_seconds`: medians of the rounds, from the command to its end."""

    what: str
    seconds: float
    core_seconds: float
    said: str


def nothing(folder: Path) -> None:
    del folder


def cases() -> Iterator[tuple[list[str], Callable[[Path], Any]]]:
    yield from ((list(arguments), nothing) for arguments, _ in OPTIONS)
    yield from (([model, "--port", "0"], make) for model, make, _ in FILES)


def measure(
    what: str, folder: Path, arguments: list[str], environment: Mapping[str, str]
) -> Mistake:
    seconds, core_seconds = [], []
    for _ in range(ROUNDS):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        begin = time.perf_counter()
        done = subprocess.run(
            [PROGRAM, "serve", *arguments], cwd=folder, env=dict(environment), text=True,
            capture_output=True, timeout=120,
        )  # fmt: skip
        seconds.append(time.perf_counter() - begin)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        core_seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert done.returncode in (2, 3), (what, done)
        assert done.stderr.count("\n") == 1, (what, done.stderr)
    said = done.stderr.partition(": ")[2].strip()
    return Mistake(what, statistics.median(seconds), statistics.median(core_seconds), said)


def run(work: Path) -> list[Mistake]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "FOVEAL_"))}
    home = {**kept, "HOME": str(work), "XDG_CACHE_HOME": str(work / "cache")}
    found = []
    for number, (arguments, make) in enumerate(cases()):
        folder = work / str(number)
        checkpoint(folder / "model")
        make(folder)
        found.append(measure(" ".join(arguments) or "(nothing)", folder, arguments, home))
    folder = work / "more"
    checkpoint(folder / "model")
    profile = write_profile(folder)
    found.append(
        measure("too little memory", folder,
                ["model", "--port", "0", "--profile", profile, "--kv-cache", "64Ti"], home)
    )  # fmt: skip
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        found.append(
            measure("a second start (port taken)", folder, ["model", "--port", port], home)
        )
    return [*found, *of_the_hub(work, folder, home)]


def of_the_hub(work: Path, folder: Path, home: dict[str, str]) -> Iterator[Mistake]:
    """The hub's own library is imported and asks over HTTP."""
    files = checkpoint(work / "files", {**CONFIG, "model_type": "mllama"})
    with Hub("org/tiny", files).running() as hub:
        there = {**home, **hub.environment(work / "hf")}
        hub.refusal = 401, "RepoNotFound"
        yield measure("wrong token", folder, ["org/tiny"], {**there, "HF_TOKEN": "wrong"})
        hub.refusal = 403, "GatedRepo"
        yield measure("gated model", folder, ["org/tiny"], there)
        hub.refusal = None
        yield measure("no such model", folder, ["org/other"], there)
        yield measure("unknown architecture, weights not downloaded", folder, ["org/tiny"], there)
        away = {**there, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(work / "empty")}
        yield measure("no network", folder, ["org/tiny"], away)


def main() -> None:
    with tempfile.TemporaryDirectory() as work:
        found = run(Path(work).resolve())
    for one in found:
        print(f"{one.seconds:6.2f} s {one.core_seconds:6.2f} s of a core  {one.what[:60]:60}  "
              f"{one.said[:90]}")  # fmt: skip
    slowest = max(found, key=lambda one: one.seconds)
    late = [one for one in found if one.seconds > 1]
    median = statistics.median(one.seconds for one in found)
    print(f"{len(found)} mistakes; median {median:.2f} s, slowest {slowest.seconds:.2f} s "
          f"({slowest.what}); {len(late)} over 1 s")  # fmt: skip


if __name__ == "__main__":
    main()
