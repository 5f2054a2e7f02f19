"""The serving bench: the same seeded requests to several servers, paired and alternating.

    python -m e2e.bench --quick                       # tiny model, what is installed, minutes
    python -m e2e.bench --servers foveal,vllm,transformers --traces hits-0,hits-30,hits-95 \\
        --model llava-small --rounds 3
    python -m e2e.bench --starts                      # from the command to the first answer
    python -m e2e.bench --model smollm2-audio --servers foveal,foveal-no-caches   # true answers

Ratios are of the first server over each other. Exits with 1 when a request failed or, in float32,
when two servers gave different answers; never because something was slow.
See docs/contributing/bench.md.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from e2e.bench import processes, sockets
from e2e.bench.checkpoints import ASSEMBLED, SHAPES, checkpoint
from e2e.bench.machine import machine_facts, versions
from e2e.bench.servers import MAKERS, Options, Server, end_servers_on_sigterm, is_installed
from e2e.bench.starts import Start, StartReport, run_starts, table
from foveal_runtime.bench.client import Target
from foveal_runtime.bench.display import BarProgress, draw_plot, show, verdict
from foveal_runtime.bench.images import ImageKind
from foveal_runtime.bench.report import Report, ServerFacts, dumps, tables
from foveal_runtime.bench.runs import BenchLoad, Costs, run_all, split_kind
from foveal_runtime.bench.traces import KINDS

IDLE_SECONDS = 3.0
BUNDLED = Path(__file__).resolve().parents[2] / "examples" / "tiny-vlm" / "model"
QUICK = {"model": "llava-tiny", "traces": "hits-0,hits-95,mixed", "requests": 12, "rounds": 2}
USUAL = {"model": "llava-small", "traces": "hits-0,hits-30,hits-70,hits-95", "requests": 24,
         "rounds": 3}  # fmt: skip
STARTS = {"model": str(BUNDLED), "rounds": 3}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m e2e.bench", description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--quick", action="store_true", help="smaller defaults: " + str(QUICK))
    add("--starts", action="store_true", help="measure starts alone; the bundled model by default")
    add("--servers", default="", help=f"of {', '.join(MAKERS)}; default: foveal and peers here")
    add("--traces", help=f"of {', '.join(KINDS)}, or all; text@32: 32 at a time; default "
        f"{USUAL['traces']}")  # fmt: skip
    add("--model", help=f"{', '.join((*SHAPES, *ASSEMBLED))}, or a folder; default "
        f"{USUAL['model']}")  # fmt: skip
    add("--dtype", default="float32", choices=["float32", "bfloat16"])
    add("--device", default="cpu", choices=["cpu", "cuda"])
    add("--requests", type=int, help="of a trace; 0: as many as it usually has")
    add("--rounds", type=int, help="each with a seed of its own")
    add("--concurrency", type=int, help="default 4, with --rate no limit")
    add("--rate", type=float, default=0.0, help="Poisson arrivals a second")
    add("--max-tokens", type=int, default=16)
    add("--words", type=int, default=50, help="of a question")
    add("--image", type=ImageKind.parse, default=ImageKind(), help="e.g. 1024x1024.jpeg")
    add("--threads", type=int, default=0, help="of computation, not with vllm; 0: as each decides")
    add("--seed", type=int, default=1)
    add("--out", type=Path, default=Path("out/bench"))
    add("--label", default="serving", help="begins the names of the files written")
    arguments = parser.parse_args(argv)
    defaults = QUICK if arguments.quick else USUAL
    for name, value in (defaults | (STARTS if arguments.starts else {})).items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    if arguments.traces == "all":
        arguments.traces = ",".join(KINDS)
    try:
        kinds = [split_kind(kind)[0] for kind in arguments.traces.split(",")]
    except ValueError as error:
        parser.error(f"--traces: {error}; write text@32")
    for given, known in ((kinds, KINDS), (arguments.servers.split(","), MAKERS)):
        if wrong := [n for n in given if n and n not in known]:
            parser.error(f"unknown: {', '.join(wrong)}; there are {', '.join(known)}")
    if not arguments.servers:
        arguments.servers = ",".join(filter(is_installed, ("foveal", "vllm", "transformers")))
    return arguments


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)
    end_servers_on_sigterm()
    names = arguments.servers.split(",")
    for name in names:
        if not is_installed(name):
            raise SystemExit(f"{name} is not installed; run `make bench-peers`")
    known = (*SHAPES, *ASSEMBLED)
    model = checkpoint(arguments.model) if arguments.model in known else Path(arguments.model)
    asked = None
    if arguments.model in ASSEMBLED:
        from e2e.bench.truths import truths

        asked = truths(arguments.model, arguments.seed, arguments.requests or 24)
    concurrency = arguments.concurrency
    if concurrency is None:
        concurrency = 0 if arguments.rate else 4
    load = BenchLoad(
        tuple(arguments.traces.split(",")), arguments.requests, concurrency,
        arguments.rate, arguments.max_tokens, arguments.words, arguments.image,
        asked.trace if asked else None,
    )  # fmt: skip
    options = Options(model.resolve(), arguments.dtype, arguments.device, arguments.threads)
    arguments.out.mkdir(parents=True, exist_ok=True)
    date = datetime.datetime.now().strftime("%Y-%m-%d-%H%M%S")
    label = "starts" if arguments.starts else arguments.label
    path = arguments.out / f"{label}-{date}.json"
    if arguments.starts:
        return _starts(names, options, arguments.rounds, path)
    shown = {k: str(v) if isinstance(v, Path) else v for k, v in vars(arguments).items()}
    report = Report(
        date=date[:10], command=sys.argv, machine=machine_facts(), versions=versions(),
        options={**shown, "model": str(model), "equal_replies": arguments.dtype == "float32"},
        servers=[], results=[],
    )  # fmt: skip
    with contextlib.ExitStack() as stack:
        folder = path.with_suffix(".logs")
        folder.mkdir()
        progress = stack.enter_context(BarProgress())
        servers: dict[str, Server] = {}
        for name in names:
            progress.stage(f"starting {name}", 1)
            servers[name] = stack.enter_context(Server(MAKERS[name](name, options), folder))
        report.servers = [_facts(server) for server in servers.values()]
        targets = [server.spec.target for server in servers.values()]

        def meter(target: Target) -> Callable[[], Costs]:
            return _costs(servers[target.name])

        for result in run_all(targets, load, arguments.rounds, arguments.seed, progress, meter):
            report.results.append(result)
            path.write_bytes(dumps(report))  # what is measured is kept, whatever comes
    wrong = show(report)
    for result in report.results if asked else ():
        print(f"round {result.round}, {result.server}: {asked.share(result):.0%} of answers true")
    text = "\n".join(table.markdown() for table in tables(report))
    path.with_suffix(".md").write_text(f"{text}\n{verdict(wrong)}")
    draw_plot(report, path.with_suffix(".svg"))
    print(f"{path}, .md and .svg")
    return 1 if wrong else 0


def _starts(names: list[str], options: Options, rounds: int, path: Path) -> int:
    """Measures starts into `path` and a table beside it; 1 when a server did not start."""
    report = StartReport(
        date=datetime.datetime.now().strftime("%Y-%m-%d"), command=sys.argv,
        machine=machine_facts(), versions=versions(), model=str(options.model), starts=[],
    )  # fmt: skip
    folder = path.with_suffix(".logs")
    folder.mkdir()

    def done(start: Start) -> None:
        report.starts.append(start)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(report)))
        said = (
            start.error or f"ready {start.ready_seconds:.1f} s, answer {start.answer_seconds:.1f} s"
        )
        print(f"round {start.round}: {start.server}: {said}", flush=True)

    run_starts(names, options, rounds, folder, done=done)
    text = table(report).markdown()
    path.with_suffix(".md").write_text(text)
    print(f"{text}\n{path} and .md")
    return 1 if report.problems else 0


def _costs(server: Server) -> Callable[[], Costs]:
    """What the server's processes spend from now until what this returns is called."""
    has_ports = server.spec.engine_ports
    wire = sockets.engine_sockets(server.pid) if has_ports else None
    cpu = processes.cpu_seconds(server.pid)

    def costs() -> Costs:
        spent = processes.cpu_between(cpu, processes.cpu_seconds(server.pid))
        after = sockets.engine_sockets(server.pid) if has_ports else None
        return {
            "cpu_seconds": spent,
            "pss_bytes": processes.pss_bytes(server.pid),
            "wire_bytes": sockets.bytes_between(wire, after),
        }

    return costs


def _facts(server: Server) -> ServerFacts:
    before = processes.cpu_seconds(server.pid)
    time.sleep(IDLE_SECONDS)
    spent = processes.cpu_between(before, processes.cpu_seconds(server.pid))
    return ServerFacts(
        name=server.name,
        urls=list(server.spec.target.urls),
        model=server.spec.target.model,
        command=server.spec.command,
        start_seconds=server.start_seconds,
        idle_cpu_cores=sum(spent.values()) / IDLE_SECONDS,
        rest_pss_bytes=processes.pss_bytes(server.pid),
    )


if __name__ == "__main__":
    sys.exit(main())
