"""A real deployment on this machine: the simulation's costs, and the runs it must agree with."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import math
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import psutil

from e2e.bench import processes
from e2e.bench.machine import machine_facts
from e2e.bench.servers import Options, Server, Spec, _foveal
from e2e.bench.simulation.costs import (
    FEATURES,
    NUM_FITS,
    ROLES,
    Costs,
    Deployment,
    Role,
    Table,
    fit,
)
from e2e.bench.simulation.steps import Steps
from e2e.bench.simulation.virtual import Cores, run
from e2e.bench.simulation.world import Ask, World, converse
from foveal_runtime.bench.client import Replay, Reply, get
from foveal_runtime.bench.images import ImageKind, data_url, draw
from foveal_runtime.bench.runs import Counts, read_hits
from foveal_runtime.bench.saved import messages_of
from foveal_runtime.bench.stats import percentile
from foveal_runtime.bench.traces import Trace, make_trace
from foveal_runtime.frontend.text.tokenizer import TextTokenizer
from foveal_runtime.plan.config import EngineConfig, load

SERVING = {"frontend": "frontend", "worker": "media worker", "engine": "engine"}
"""Roles of the processes that serve, as the bench calls them."""
NUM_CORES = 2
PACE_SECONDS = 5.0
FLAGS = ("--threads", "1", "--kv-cache", "512Mi", "--ipc-cache", "16Mi")
FILL_REQUESTS = 130
"""With an image each, 640 tokens: more than an engine's KV memory of FLAGS holds (65,536)."""
IMAGE = ImageKind()
CACHES = ("ipc", "prefix", "encoder")
TRACES = (("mixed", 5, 480), ("hits-70", 6, 480), ("text", 7, 1440))
"""Kind, seed and requests: some 20 s of them, since the pace of the machine changes within one."""
KINDS = (
    ("text", 64, 8, 4), ("text", 64, 40, 4), ("text", 32, 40, 1), ("hits-0", 64, 16, 4),
    ("hits-95", 64, 16, 4), ("multi-turn", 48, 16, 4),
)  # fmt: skip
"""Traces of the calibration: requests, tokens of output, conversations at a time."""


class Played(NamedTuple):
    """One trace on a real deployment. `began`: seconds since 1970; `cpu`: seconds by role;
    `others`: cores that the rest of the machine, the launcher included, used meanwhile."""

    trace: Trace
    replies: list[Reply]
    began: float
    seconds: float
    cpu: dict[str, float]
    others: float
    hits: Counts


class Real:
    """A running deployment with its engines' documents."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.idle = 0.0
        [self.document, *_] = [
            Path(process.cmdline()[process.cmdline().index("--config") + 1])
            for process in processes.tree(server.pid)
            if processes.role_of(process.cmdline()) == "engine"
        ]

    def play(self, trace: Trace, concurrency: int) -> Played:
        urls = {image: data_url(image, IMAGE) for image in trace.images}
        before, cpu, busy = self._hits(), self._cpu(), _busy_seconds()
        replay, began = Replay(self.server.spec.target, trace, urls), time.time()
        replies, seconds = asyncio.run(replay.run(concurrency))
        if failed := [reply.error for reply in replies if reply.error]:
            raise SystemExit(f"{self.server.name}, {trace.name}: {failed[0]}")
        after = self._cpu()
        spent = {role: after[role] - cpu.get(role, 0.0) for role in after}
        ours = sum(spent.get(role, 0.0) for role in (*SERVING.values(), "client"))
        others = max(0.0, (_busy_seconds() - busy - ours) / seconds)
        now = self._hits()
        hits = {name: (now[name][0] - before[name][0], now[name][1] - before[name][1])
                for name in CACHES}  # fmt: skip
        return Played(trace, replies, began, seconds, spent, others, hits)

    def rest(self, seconds: float = 3.0) -> None:
        """Measures what the processes use while nobody asks anything."""
        before = self._cpu()
        time.sleep(seconds)
        after = self._cpu()
        self.idle = sum(after[role] - before[role] for role in SERVING.values()) / seconds

    def _cpu(self) -> dict[str, float]:
        found = processes.cpu_between({}, processes.cpu_seconds(self.server.pid))
        return {**found, "client": time.process_time()}

    def _hits(self) -> Counts:
        """Of all frontends and engines together: each frontend tells them all."""
        return read_hits(get(self.server.spec.target, "/metrics", 10).decode())


def _busy_seconds() -> float:
    """CPU seconds that all cores together did not rest."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - times.iowait - times.guest - times.guest_nice)


@contextlib.contextmanager
def deployed(model: Path, folder: Path, num_frontends: int, num_engines: int) -> Iterator[Real]:
    name = f"{num_frontends}x{num_engines}"
    spec: Spec = _foveal(
        name, Options(model), "--engines", str(num_engines), *FLAGS, num_frontends=num_frontends
    )
    with Server(spec, folder) as server:
        real = Real(server)
        # Pods touch KV memory at their start, `serve` does not: all of it is written here.
        fill = make_trace("hits-0", 999_999, FILL_REQUESTS * num_engines, max_tokens=1)
        real.play(fill, 4 * num_engines)
        real.play(make_trace("mixed", 999_998, 3 * num_frontends), num_frontends)
        real.rest()
        yield real


class Run(NamedTuple):
    """One trace of the calibration. `idle`: cores that the frontends use while nobody asks."""

    num_frontends: int
    concurrency: int
    played: Played
    idle: float


def calibrated(folder: Path, model: Path) -> dict[str, Any]:
    """Costs from deployments of one engine beside steps of the model, and from those alone. With
    one frontend every step is a message, with four there are up to four: two costs, where one
    deployment would show their sum."""
    document, runs = folder / "engine.json", []
    both: list[Steps] = []
    alone: list[Steps] = []
    for number, num_frontends in enumerate((1, 4, 1, 4)):
        with deployed(model, folder, num_frontends, 1) as real:
            if number == 0:
                document.write_bytes(real.document.read_bytes())
            alone += timed_steps(document, folder, 1)
            with beside(document, folder, both):
                for i, (kind, num, tokens, concurrency) in enumerate(KINDS):
                    trace = make_trace(kind, 70 + 10 * number + i, num, max_tokens=tokens)
                    played = real.play(trace, concurrency)
                    runs.append(Run(num_frontends, concurrency, played, real.idle))
        both += timed_steps(document, folder, NUM_CORES)
    deployment, costs = both[0].deployment, step_costs(both, alone)
    costs = with_roles(costs, deployment, Words(model, deployment), runs, both)
    costs = msgspec.structs.replace(
        costs, machine=machine_facts(), date=datetime.date.today().isoformat()
    )
    return {"deployment": msgspec.to_builtins(deployment), "costs": msgspec.to_builtins(costs)}


def with_roles(
    costs: Costs, deployment: Deployment, words: Words, runs: Sequence[Run], steps: Sequence[Steps]
) -> Costs:
    """What processes used beside the steps that the simulation makes of the same requests, at the
    pace that `steps` had meanwhile."""
    ends = [one.played.began + one.played.seconds for one in runs]
    at = [pace_of(steps, costs, one.played.began, e) for one, e in zip(runs, ends, strict=True)]
    found = [
        simulate([words.talks(one.played)], [one.concurrency], deployment, costs.at_pace(pace),
                 one.num_frontends, 1, one.played.others)
        for one, pace in zip(runs, at, strict=True)
    ]  # fmt: skip
    roles: dict[str, Any] = {}
    for role in ROLES:
        spent = [one.played.cpu.get(SERVING.get(role, role), 0.0) for one in runs]
        if role == "engine":
            spent = [a - b.step_seconds for a, b in zip(spent, found, strict=True)]
        if role == "frontend":
            spent = [a - b.idle * b.played.seconds for a, b in zip(spent, runs, strict=True)]
        spent = [seconds / pace for seconds, pace in zip(spent, at, strict=True)]
        rows = [one.counts[role] for one in found]
        roles[role] = Role(*fit(rows, spent))
        said = np.array(rows) @ np.array(msgspec.structs.astuple(roles[role]))
        print(f"{role:9}", *(f"{1e3 * v:.2f}" for v in msgspec.structs.astuple(roles[role])),
              f"ms, {sum(said):.2f} of {sum(spent):.2f} s:",
              *(f"{a:.2f}/{b:.2f}" for a, b in zip(said, spent, strict=True)))  # fmt: skip
    return msgspec.structs.replace(costs, **roles)


def timed_steps(document: Path, folder: Path, count: int) -> list[Steps]:
    """Of `count` processes at once."""
    found: list[Steps] = []
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            stack.enter_context(beside(document, folder, found, until_left=False))
    return found


@contextlib.contextmanager
def beside(
    document: Path, folder: Path, found: list[Steps], until_left: bool = True
) -> Iterator[None]:
    """Steps of the model beside what the caller does; they are in `found` afterwards. `until_left`:
    they have begun when the caller goes on, and end with it; else they are a number of plays."""
    picture = folder / "picture.png"
    picture.write_bytes(draw(1, IMAGE))
    command = [sys.executable, "-m", "e2e.bench.simulation.steps", str(document), str(picture)]
    stdin = subprocess.PIPE if until_left else subprocess.DEVNULL
    with subprocess.Popen(command, stdin=stdin, stdout=subprocess.PIPE) as process:
        if until_left:
            assert process.stdout is not None
            process.stdout.readline()
        yield
        output, _ = process.communicate()
    found.append(msgspec.json.decode(output, type=Steps))


def step_costs(both: Sequence[Steps], alone: Sequence[Steps]) -> Costs:
    """Of two processes at once, as engines are, and of one alone."""
    rows, seconds, _ = joined(both)
    found = fit(rows, seconds)
    for _ in range(NUM_FITS):  # without what the machine's pace did
        found = fit(rows, seconds / paces(both, found))
    found_alone = fit(*joined(alone)[:2])
    table = np.array(rows)
    predicted = table @ np.array(found)
    error = float(np.median(np.abs(predicted - seconds) / np.array(seconds)))
    speed = float(predicted.sum() / (table @ np.array(found_alone)).sum())
    print(f"{len(rows)} steps: median error {error:.1%}; total {predicted.sum():.2f} for "
          f"{sum(seconds):.2f} s; alone {speed:.2f} x faster")  # fmt: skip
    step = dict(zip(FEATURES, found, strict=True))
    costs = Costs(step=step, alone_speed=speed, fit_error=error)
    print({name: f"{1e6 * value:.3g} us" for name, value in step.items()},
          "paces", *(f"{pace_of([one], costs):.2f}" for one in both))  # fmt: skip
    return costs


def joined(found: Sequence[Steps]) -> tuple[Table, Table, Table]:
    """Rows, seconds and ends of all."""
    parts = [(one.rows, one.seconds, one.ends) for one in found]
    rows, seconds, ends = (np.concatenate(part) for part in zip(*parts, strict=True))
    return rows, seconds, ends


def paces(found: Sequence[Steps], costs: Sequence[float]) -> Table:
    """Of each step: how many times what `costs` of FEATURES say the steps of its time took."""
    rows, seconds, ends = joined(found)
    said = rows @ np.array(costs)
    at = (ends / PACE_SECONDS).astype(int)
    at -= at.min()
    total = np.bincount(at, seconds) / np.maximum(np.bincount(at, said), 1e-9)
    return total[at] * float(said.sum() / (total[at] * said).sum())


def pace_of(
    found: Sequence[Steps], costs: Costs, since: float = 0.0, until: float = math.inf
) -> float:
    """How many times what `costs` say steps took that ended between two times."""
    rows, seconds, ends = joined(found)
    said = rows @ np.array([costs.step.get(name, 0.0) for name in FEATURES])
    then = (since <= ends) & (ends <= until)
    return float(seconds[then].sum() / said[then].sum())


class Words:
    """A bench's trace as the simulation takes it: tokens as the server's, replies as they were."""

    def __init__(self, model: Path, deployment: Deployment) -> None:
        import jinja2

        self._tokenizer = TextTokenizer.load(model)
        source = (model / "chat_template.jinja").read_text()
        self._template = jinja2.Environment().from_string(source)
        self._deployment = deployment

    def talks(self, played: Played) -> list[list[Ask]]:
        replies = {(r.conversation, r.turn): r for r in played.replies}
        found = []
        for number, questions in enumerate(played.trace.conversations):
            messages: list[dict[str, Any]] = []
            images: list[int] = []
            asks = []
            for turn, question in enumerate(questions):
                reply = replies[number, turn]
                messages += messages_of(question, dict.fromkeys(question.images, ""))
                images += question.images
                asks.append(self._ask(messages, images, reply))
                messages.append({"role": "assistant", "content": reply.text})
            found.append(asks)
        return found

    def _ask(self, messages: list[dict[str, Any]], images: list[int], reply: Reply) -> Ask:
        text = self._template.render(messages=messages, add_generation_prompt=True)
        tokens = self._tokenizer.encode(text, add_special_tokens=False)
        expanded = len(tokens) + len(images) * (self._deployment.item_tokens - 1)
        if expanded != reply.num_prompt_tokens:
            raise SystemExit(f"a prompt has {reply.num_prompt_tokens} tokens and not {expanded}")
        said = self._tokenizer.encode(reply.text, add_special_tokens=False)
        said = (said + [5] * reply.num_output_tokens)[: reply.num_output_tokens]
        return Ask(tokens, tuple(images), tuple(said))


class Simulated(NamedTuple):
    """The last of the traces that were played: as `Played`. `counts`: what each role was charged
    for."""

    seconds: float
    ttfts: list[float]
    hits: Counts
    step_seconds: float
    cpu: dict[str, float]
    counts: dict[str, list[float]]


def simulate(
    traces: Sequence[Sequence[Sequence[Ask]]], concurrencies: Sequence[int],
    deployment: Deployment, costs: Costs, num_frontends: int, num_engines: int,
    others: float = 0.0,
) -> Simulated:  # fmt: skip
    """Traces one after the other on a deployment; figures are of the last one."""

    async def main() -> Simulated:
        alone = 1 + (costs.alone_speed - 1) * max(1 - others, 0)
        cores = Cores(NUM_CORES - others, alone)
        async with World(deployment, costs, num_frontends, num_engines, cores=cores) as world:
            engines = world.engines.values()

            def counts() -> dict[str, list[float]]:
                return {role: list(one.counts.values()) for role, one in world.charges.items()}

            for talks, concurrency in zip(traces, concurrencies, strict=True):
                world.answers.clear()
                hits, cpu, before = world.hits(), world.cpu(), counts()
                steps = sum(engine.step_seconds for engine in engines)
                await converse(world, talks, concurrency)
            return Simulated(
                max(a.done for a in world.answers) - min(a.sent for a in world.answers),
                [a.first - a.sent for a in world.answers],
                {name: (now[0] - hits[name][0], now[1] - hits[name][1])
                 for name, now in world.hits().items()},
                sum(engine.step_seconds for engine in engines) - steps,
                {role: now - cpu[role] for role, now in world.cpu().items()},
                {role: [a - b for a, b in zip(now, before[role], strict=True)]
                 for role, now in counts().items()},
            )  # fmt: skip

    return run(main())


class Error(msgspec.Struct):
    """One figure, real and simulated. `off`: relative, for hit ratios in points."""

    trace: str
    figure: str
    real: float
    simulated: float
    off: float
    limit: float

    @property
    def holds(self) -> bool:
        return abs(self.off) <= self.limit


def compare(played: Played, found: Simulated) -> list[Error]:
    name, count = played.trace.name, len(played.replies)
    real_ttft = percentile([r.first_token_seconds for r in played.replies], 50)
    errors = []
    for figure, real, simulated, limit in (
        ("requests/s", count / played.seconds, count / found.seconds, 0.08),
        ("TTFT p50, s", real_ttft, percentile(found.ttfts, 50), 0.20),
    ):
        errors.append(Error(name, figure, real, simulated, simulated / real - 1, limit))
    for cache, (hits, queries) in played.hits.items():
        if queries:
            ours = found.hits[cache][0] / max(found.hits[cache][1], 1)
            errors.append(
                Error(name, f"{cache} hits", hits / queries, ours, ours - hits / queries, 0.03)
            )
    return errors


def validate(folder: Path, model: Path, deployment: Deployment, costs: Costs) -> dict[str, Any]:
    """Runs 4 x 2, simulates it. Returns what is to be recorded. Costs are those of the calibration
    at the machine's pace around each play: what a second of CPU does changes within minutes."""
    words = Words(model, deployment)
    with deployed(model, folder, 4, 2) as real:
        # Planned for two: from the same memory each has a smaller encoder cache than one alone.
        engine = load(str(real.document), EngineConfig)
        plays, steps = [], [timed_steps(real.document, folder, NUM_CORES)]
        for kind, seed, requests in TRACES:
            plays.append(real.play(make_trace(kind, seed, requests), 8))
            steps.append(timed_steps(real.document, folder, NUM_CORES))
    around = [pace_of(steps[i] + steps[i + 1], costs) for i in range(len(plays))]
    print("paces", *(f"{pace_of(one, costs):.2f}" for one in steps), flush=True)
    deployment = msgspec.structs.replace(deployment, engine=engine)
    errors: list[Error] = []
    for number, played in enumerate(plays):
        talks = [words.talks(one) for one in plays[: number + 1]]
        found = simulate(
            talks,
            [8] * len(talks),
            deployment,
            costs.at_pace(around[number]),
            4,
            2,
            played.others + real.idle,
        )
        errors += compare(played, found)
        cpu = {role: (played.cpu.get(SERVING.get(role, role), 0.0), found.cpu[role])
               for role in ROLES}  # fmt: skip
        print(f"{played.trace.name}: {played.seconds:.1f} s, others {played.others:.2f}, idle "
              f"{real.idle:.2f} cores; CPU seconds real/simulated:",
              *(f"{role} {a:.2f}/{b:.2f}" for role, (a, b) in cpu.items()),
              f"of which steps {found.step_seconds:.2f}", flush=True)  # fmt: skip
    for one in errors:
        print(f"{one.trace:8} {one.figure:13} real {one.real:8.4f} simulated {one.simulated:8.4f} "
              f"off {one.off:+.1%} (limit {one.limit:.0%}){'' if one.holds else ' NOT REACHED'}",
              flush=True)  # fmt: skip
    return {
        "errors": msgspec.to_builtins(errors), "paces": around,
        "others": [one.others for one in plays],
        "cpu": [one.cpu for one in plays], "seconds": [one.seconds for one in plays],
        "machine": machine_facts(),
    }  # fmt: skip
