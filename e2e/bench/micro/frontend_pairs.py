"""Frontend CPU of two source trees in turn: what a change saves, on a machine that is never quiet.

Starts one frontend of each tree (as `frontend_cpu` has it: app, media worker, an engine without a
model) and gives both the same requests, block by block, the order changing with each. Ratios are
of blocks of one pair.

    git worktree add --detach ../before COMMIT
    python -m e2e.bench.micro.frontend_pairs ../before . [--pairs 40] [--kinds text,repeated,new]

Kinds: a text, a repeated and a new megapixel JPEG; `-stream` behind one streams 16 tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import uvloop

from e2e.bench.micro import frontend_cpu as bench
from foveal_runtime.telemetry.memory import give_back_large_blocks

Costs = tuple[float, float]
"""CPU milliseconds a request, of the HTTP process and of the media worker."""


# ---- a frontend of one tree ---------------------------------------------------------------------
async def answer_orders(folder: str) -> None:
    """Reads lines with the paths of bodies, posts them and writes what they cost."""
    async with bench.frontend(folder, caches=True) as (app, workers):
        orders = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(orders), sys.stdin
        )
        print("[]", flush=True)
        while line := await orders.readline():
            bodies = [read(path) for path in json.loads(line)]
            worked, began = bench.worker_seconds(workers.pids()), time.process_time()
            for body in bodies:
                await bench.post(app, body)
            took = time.process_time() - began
            worked = bench.worker_seconds(workers.pids()) - worked
            print(json.dumps([s / len(bodies) * 1e3 for s in (took, worked)]), flush=True)


def read(path: str) -> bytes:
    return Path(path).read_bytes()


class Frontend:
    def __init__(self, tree: str, folder: str) -> None:
        source = Path(tree).resolve() / "runtime" / "src"
        environment = {**os.environ, "PYTHONPATH": f"{source}:.", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "e2e.bench.micro.frontend_pairs", "--serve", folder],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip
        assert self._line() == []

    def cost(self, paths: list[str]) -> Costs:
        assert self._process.stdin is not None
        print(json.dumps(paths), file=self._process.stdin, flush=True)
        http, worker = self._line()
        return http, worker

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)

    def _line(self) -> list[float]:
        assert self._process.stdout is not None
        found: list[float] = json.loads(self._process.stdout.readline())
        return found


# ---- blocks in turn -----------------------------------------------------------------------------
def block(kind: str, number: int, folder: str) -> list[str]:
    """Paths of the bodies of one block: both frontends get the same."""
    name, _, streams = kind.partition("-")
    more = {"stream": True, "max_tokens": 16} if streams else {}
    picture = bench.PICTURES[0]

    def written(path: Path, data: bytes | None) -> str:
        body = json.loads(bench.body_of(data, picture.kind)) | more
        path.write_text(json.dumps(body, separators=(",", ":")))
        return str(path)

    if name == "new":
        return [written(Path(folder) / f"new-{i}", picture.make(4 * number + i)) for i in range(4)]
    path = Path(folder) / kind
    if not path.exists():
        written(path, picture.make(1 << 40) if name == "repeated" else None)
    return [str(path)] * 6


def spread(values: list[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trees", nargs="*", help="before and after")
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--kinds", default="text,repeated,new")
    parser.add_argument("--serve", metavar="FOLDER", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    if arguments.serve:
        give_back_large_blocks()
        uvloop.run(answer_orders(arguments.serve))
        return 0
    kinds = arguments.kinds.split(",")
    with tempfile.TemporaryDirectory() as folder:
        bench.save_model(folder)
        frontends = [Frontend(tree, folder) for tree in arguments.trees]
        costs: dict[str, list[list[Costs]]] = {kind: [] for kind in kinds}
        for number in range(arguments.pairs + 2):
            for kind in kinds:
                paths = block(kind, number * len(kinds) + kinds.index(kind), folder)
                turns = list(enumerate(frontends))[:: -1 if number % 2 else 1]
                pair = {which: one.cost(paths) for which, one in turns}
                costs[kind].append([pair[which] for which in sorted(pair)])
        for one in frontends:
            one.close()
    print("| request | HTTP process, ms, before | after | worker before | after | after : before |")
    print("|---|---:|---:|---:|---:|---:|")
    for kind in kinds:
        pairs = costs[kind][2:]
        columns = [spread([pair[i][part] for pair in pairs]) for part in (0, 1) for i in (0, -1)]
        ratio = spread([sum(pair[-1]) / sum(pair[0]) for pair in pairs])
        print(f"| {kind} | {' | '.join(columns)} | {ratio} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
