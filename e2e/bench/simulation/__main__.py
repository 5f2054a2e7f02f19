"""Foveal at scale: a simulation in virtual time, with its errors.

    python -m e2e.bench.simulation                        # calibrate, validate, limits, the fleet
    python -m e2e.bench.simulation --costs out/simulation/costs.json --stages limits,fleet
    python -m e2e.bench.simulation --frontends 200 --engines 40 --requests 8000

The product's client, mirrors, scheduler and caches over stage costs that are measured on a real
1 x 1 deployment; the errors against a real 4 x 2 on the same machine are printed and kept, whatever
they are. Writes JSON to out/simulation and pictures to --images. See docs/concepts/scale.md.
"""

from __future__ import annotations

import argparse
import datetime
import logging
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec

from e2e.bench.checkpoints import SHAPES, checkpoint
from e2e.bench.servers import end_servers_on_sigterm
from e2e.bench.simulation import limits, plots
from e2e.bench.simulation.costs import Costs, Deployment
from e2e.bench.simulation.fleet import Day, FleetRouter, Hour, RoundRobin, live, shrunk
from foveal_runtime.engine.process.core import NOTE_DELAY_SECONDS
from foveal_runtime.engine.process.load_reports import PER_SECOND

STAGES = ("calibrate", "validate", "limits", "fleet")
IMAGES, ENCODED, PROMPTS = 24, 8, 16
CATALOGUE = 10
"""Images of the catalogue for each engine; beside it, what an engine of the shrunk day holds."""
VALUE_CACHE_BYTES = 4 << 30
MIRROR_MEMORY_BYTES = 1 << 30
SMALL = (40, 8)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m e2e.bench.simulation", description=__doc__.split("\n")[0]
    )
    add = parser.add_argument
    add("--stages", default=",".join(STAGES), help=f"of {', '.join(STAGES)}")
    add("--costs", type=Path, help="measured before; default: calibrate writes it to --out")
    add("--model", default="llava-tiny", choices=sorted(SHAPES))
    add("--frontends", type=int, default=1000)
    add("--engines", type=int, default=200)
    add("--clients", type=int, default=4, help="that stand for all frontends' links and mirrors")
    add("--requests", type=int, default=24_000, help="of the shrunk day")
    add("--rate", type=float, default=6.0, help="requests a second and engine, mean of the day")
    add("--seed", type=int, default=1)
    add("--out", type=Path, default=Path("out/simulation"))
    add("--images", type=Path, default=Path("out/simulation"))
    arguments = parser.parse_args(argv)
    arguments.stages = arguments.stages.split(",")
    if wrong := set(arguments.stages) - set(STAGES):
        parser.error(f"--stages: unknown: {', '.join(sorted(wrong))}; there are {STAGES}")
    arguments.costs = arguments.costs or arguments.out / "costs.json"
    if "calibrate" not in arguments.stages and not arguments.costs.is_file():
        parser.error(f"--costs {arguments.costs}: no such file; leave calibrate among --stages")
    return arguments


def keep(path: Path, found: Any) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(found)) + b"\n")


def means(hours: list[Hour]) -> dict[str, float]:
    """Hits by cache and seconds to the first token, hours counted by their requests."""
    total = sum(hour.requests for hour in hours)
    figures = [
        {**hour.hits, "TTFT p50": hour.ttft_p50, "TTFT p99": hour.ttft_p99} for hour in hours
    ]
    return {
        name: sum(one[name] * hour.requests for one, hour in zip(figures, hours, strict=True))
        / total
        for name in figures[0]
    }


def fleet_errors(deployment: Deployment, costs: Costs, rate: float, seed: int) -> dict[str, Any]:
    """What sharing mirrors, shrinking the day and rare load reports change, and what routing does,
    on a fleet that is small enough to have every mirror."""
    frontends, engines = SMALL
    found: dict[str, Any] = {}
    for name, clients, scale, policy, reports in (
        ("every mirror", frontends, 1, FleetRouter, PER_SECOND),
        ("mirrors shared by 4", 4, 1, FleetRouter, PER_SECOND),
        ("day and caches twice as large", 4, 2, FleetRouter, PER_SECOND),
        ("every mirror, a load report a second", frontends, 1, FleetRouter, frontends),
        ("round robin", 4, 1, RoundRobin, PER_SECOND),
    ):
        day = Day(requests=1000 * scale, rate=rate, catalogue=CATALOGUE * engines * scale)
        caches = (scale * size for size in (IMAGES, ENCODED, PROMPTS))
        hours = live(
            shrunk(deployment, *caches), costs, day, num_frontends=frontends,
            num_engines=engines, num_clients=clients, seed=seed, policy=policy,
            reports_per_second=reports,
        )  # fmt: skip
        found[name] = means(hours)
        print(name, {k: f"{v:.3f}" for k, v in found[name].items()}, flush=True)
    return found


def run_fleet(arguments: argparse.Namespace, deployment: Deployment, costs: Costs) -> None:
    began = time.process_time()
    errors = fleet_errors(deployment, costs, arguments.rate, arguments.seed)
    day = Day(arguments.requests, arguments.rate, CATALOGUE * arguments.engines)
    hours = live(
        shrunk(deployment, IMAGES, ENCODED, PROMPTS), costs, day,
        num_frontends=arguments.frontends, num_engines=arguments.engines,
        num_clients=arguments.clients, seed=arguments.seed,
    )  # fmt: skip
    seconds = time.process_time() - began
    print(f"the day: {means(hours)}; {seconds:.0f} CPU seconds", flush=True)
    keep(arguments.out / "fleet.json", {
        "date": datetime.date.today().isoformat(), "cpu_seconds": seconds, "day": day._asdict(),
        "frontends": arguments.frontends, "engines": arguments.engines,
        "clients": arguments.clients, "seed": arguments.seed, "means": means(hours),
        "small": errors, "hours": hours,
    })  # fmt: skip
    plots.draw_day(hours, arguments.images / "scale-day.svg")


def run_limits(arguments: argparse.Namespace, deployment: Deployment, costs: Costs) -> None:
    """Measured here; the rate of reports is the protocol's most for so many frontends."""
    found = limits.measure(deployment, costs)
    breaks = limits.break_points(
        found, reports_per_second=min(1 / NOTE_DELAY_SECONDS, PER_SECOND / arguments.frontends),
        entries=VALUE_CACHE_BYTES / deployment.item_bytes,
        memory_bytes=MIRROR_MEMORY_BYTES,
        requests_per_second=arguments.rate * arguments.engines / arguments.frontends,
    )  # fmt: skip
    for one in breaks:
        print(f"{one.size:12,.0f} {one.counted:9} {one.what} ({one.why})")
    keep(arguments.out / "limits.json", {"limits": found, "breaks": breaks})
    sizes = {"frontends": arguments.frontends, "engines": arguments.engines}
    plots.draw_limits(breaks, sizes, arguments.images / "scale-limits.svg")


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)
    end_servers_on_sigterm()
    logging.disable(logging.WARNING)  # sessions end when they are done
    for folder in (arguments.out, arguments.images):
        folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="foveal-simulation-") as name:
        if {"calibrate", "validate"} & set(arguments.stages):
            from e2e.bench.simulation import measure

            model = checkpoint(arguments.model)
        if "calibrate" in arguments.stages:
            keep(arguments.costs, measure.calibrated(Path(name), model))
        kept = msgspec.json.decode(arguments.costs.read_bytes())
        deployment = msgspec.convert(kept["deployment"], Deployment)
        costs = msgspec.convert(kept["costs"], Costs)
        if "validate" in arguments.stages:
            found = measure.validate(Path(name), model, deployment, costs)
            keep(arguments.out / "validation.json", found)
    if "limits" in arguments.stages:
        run_limits(arguments, deployment, costs)
    if "fleet" in arguments.stages:
        run_fleet(arguments, deployment, costs)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
