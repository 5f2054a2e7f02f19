"""How the operator fares with many resources: goals G7 to G10, measured on a real API server.

    python -m e2e.soak.operator_scale --num 100      # minutes; --num 1000 for the full figures

Starts etcd, kube-apiserver and one operator (no controllers, no nodes: what is measured is ours),
makes resources, and prints one line per figure beside its goal. Ends with 1 when a goal is missed.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import yaml

from e2e.soak import operator_load as load
from e2e.soak.operator_watch import Arrivals
from tests.support.api_server.api import Api
from tests.support.api_server.foreign import FOREIGN, definition
from tests.support.api_server.operator_process import OperatorProcess
from tests.support.api_server.programs import running_cluster, wait_until
from tests.support.api_server.sandbox import CHILD_KINDS, KIND
from tests.support.regenerate import CRD_FILE

NAMESPACE = "many"
CHILDREN = 16
"""Objects that the sample's resource has, its profile among them; counted again in each run."""
GOALS: dict[str, float] = {
    "all applied, s per 1,000 resources": 45.0,
    "effective writes per resource": CHILDREN + 2,
    "operator CPU, ms per resource": 15.0,
    "operator RSS at its highest, MiB": 160.0,
    "writes at rest": 0,
    "LISTs per kind in 10 min at rest": 1.0,
    "objects a restart changed": 0,
    "create to all children, p99 ms": 300.0,
    "create to first status, p99 ms": 500.0,
    "pod ready to status, p99 ms": 300.0,
    "requests per resource, idle operator": CHILDREN + 2,
    "requests of a failing resource per 5 min": 1.0,
    "p99 beside a failing resource, % more": 20.0,
}


class Figures:
    """Prints each figure as it is known, and remembers which goals were missed."""

    def __init__(self) -> None:
        self.missed: list[str] = []

    def tell(self, name: str, value: float) -> None:
        goal = GOALS[name]
        verdict = "ok" if value <= goal else "MISSED"
        if verdict != "ok":
            self.missed.append(name)
        print(f"{name:44} {value:10.1f}   goal <= {goal:g}   {verdict}", flush=True)

    @staticmethod
    def note(name: str, value: float) -> None:
        print(f"{name:44} {value:10.1f}", flush=True)


class Bench:
    """One operator, one namespace, N resources."""

    def __init__(self, api: Api, operator: OperatorProcess, figures: Figures) -> None:
        self.api, self.operator, self.figures = api, operator, figures

    def metric(self, name: str, **labels: str) -> float:
        """Asked for by name: to write down the series of all resources takes its time."""
        return load.metric(self.operator.ask(f"/metrics?name[]={name}")[1], name, labels)

    def quiet(self, seconds: float, timeout_seconds: float = 600.0) -> None:
        """Until the operator has not written for a while."""
        seen = [-1.0, time.monotonic()]

        def is_quiet() -> bool:
            writes = self.metric("foveal_operator_writes_total")
            if writes != seen[0]:
                seen[:] = [writes, time.monotonic()]
            time.sleep(0.1)
            return time.monotonic() - seen[1] >= seconds

        wait_until("the operator rests", is_quiet, timeout_seconds)

    # --- the parts ---------------------------------------------------------------------------
    def many(self, num: int) -> None:
        """G7."""
        names = [f"r{i:04d}" for i in range(num)]
        cpu = load.cpu_seconds(self.operator.pid)
        started = time.monotonic()
        load.create(self.api, NAMESPACE, names)
        self.figures.note("resources made after, s", time.monotonic() - started)
        count = load.counter(self.api, NAMESPACE, "StatefulSet")
        wait_until("every resource has its engines", lambda: count() >= num, 900)
        count = load.counter(self.api, NAMESPACE, KIND, has_status=True)
        wait_until("every resource has a status", lambda: count() >= num, 300)
        self.figures.tell(
            "all applied, s per 1,000 resources", (time.monotonic() - started) * 1000 / num
        )
        self.quiet(2.0)
        children = load.versions(self.api, NAMESPACE, CHILD_KINDS)
        assert len(children) == CHILDREN * num, f"{len(children)} children of {num} resources"
        writes = self.metric("foveal_operator_writes_total")
        self.figures.tell("effective writes per resource", writes / num)
        passes = self.metric("controller_runtime_reconcile_total")
        self.figures.note("passes per resource", passes / num)
        used = load.cpu_seconds(self.operator.pid) - cpu
        self.figures.tell("operator CPU, ms per resource", used * 1000 / num)
        self.figures.tell("operator RSS at its highest, MiB", load.peak_mib(self.operator.pid))

    def rest(self, seconds: float) -> None:
        """G8: nothing happens; then a restart."""
        self.quiet(5.0)
        writes = self.metric("foveal_operator_writes_total")
        lists = self.metric("rest_client_requests_total", verb="LIST")
        cpu = load.cpu_seconds(self.operator.pid)
        end = time.monotonic() + seconds
        wait_until("the rest is over", lambda: time.monotonic() > end, seconds + 60)
        self.figures.tell("writes at rest", self.metric("foveal_operator_writes_total") - writes)
        per_kind = (self.metric("rest_client_requests_total", verb="LIST") - lists) / 20
        self.figures.tell("LISTs per kind in 10 min at rest", per_kind * 600 / max(seconds, 600))
        used = load.cpu_seconds(self.operator.pid) - cpu
        self.figures.note("CPU at rest, % of a core", 100 * used / seconds)
        started = time.monotonic()
        size = len(self.operator.ask("/metrics")[1])
        self.figures.note("all metrics, MB", size / 1e6)
        self.figures.note("all metrics, ms", 1000 * (time.monotonic() - started))
        before = load.versions(self.api, NAMESPACE, (KIND, *CHILD_KINDS))
        self.operator.kill()
        started = time.monotonic()
        self.operator.start()
        self.operator.wait_ready(300)
        self.figures.note("restart to ready, s", time.monotonic() - started)
        self.quiet(3.0)
        self.figures.note("restart to rest, s", time.monotonic() - started - 3.0)
        self.figures.note("RSS at its highest after it, MiB", load.peak_mib(self.operator.pid))
        after = load.versions(self.api, NAMESPACE, (KIND, *CHILD_KINDS))
        changed = sum(before.get(k) != after.get(k) for k in before.keys() | after.keys())
        self.figures.tell("objects a restart changed", changed)

    def one_by_one(self, num: int, prefix: str) -> dict[str, list[float]]:
        """G9: one resource after another, each when the last one is done. Milliseconds."""
        found: dict[str, list[float]] = {"children": [], "status": [], "flip": [], "requests": []}
        with Arrivals(self.api, NAMESPACE, (KIND, *CHILD_KINDS)) as arrivals:
            for i in range(num):
                name = f"{prefix}{i:03d}"
                requests = self.metric("rest_client_requests_total")
                started = time.monotonic()
                load.create(self.api, NAMESPACE, [name])
                children = arrivals.wait_children(name, CHILDREN)
                found["children"].append(1000 * (children - started))
                found["status"].append(1000 * (arrivals.wait_status(name) - started))
                self.quiet(0.3)
                found["requests"].append(self.metric("rest_client_requests_total") - requests)
                load.add_pod(self.api, NAMESPACE, name)
                arrivals.wait_engines(name, "replicas", 1)
                self.quiet(0.3)
                started = time.monotonic()
                load.set_ready(self.api, NAMESPACE, name)
                flipped = arrivals.wait_engines(name, "ready", 1)
                found["flip"].append(1000 * (flipped - started))
        return found

    def latencies(self, num: int) -> float:
        found = self.one_by_one(num, "one")
        for name, key in (
            ("create to all children, p99 ms", "children"),
            ("create to first status, p99 ms", "status"),
            ("pod ready to status, p99 ms", "flip"),
        ):
            self.figures.note(name.replace("p99", "p50"), load.percentile(found[key], 50))
            self.figures.tell(name, load.percentile(found[key], 99))
        requests = load.percentile(found["requests"], 50)
        self.figures.tell("requests per resource, idle operator", requests)
        return load.percentile(found["children"], 99)

    def neighbour(self, num: int, alone_ms: float, *, full: bool) -> None:
        """G10: one resource that the API server will never take, beside others; with `full` also
        what it asks for between its tenth minute and its fifteenth."""
        load.create(self.api, NAMESPACE, ["failing"], load.FAILING)
        self.quiet(3.0)
        started = time.monotonic()
        found = self.one_by_one(num, "two")
        beside = load.percentile(found["children"], 99)
        self.figures.tell("p99 beside a failing resource, % more", 100 * (beside / alone_ms - 1))
        if not full:
            return
        wait_until("ten minutes", lambda: time.monotonic() > started + 600.0, 660.0)
        # Applies alone: it also asks whether the API server is there, without any resource.
        before = self.metric("rest_client_requests_total", verb="APPLY")
        wait_until("five minutes", lambda: time.monotonic() > started + 900.0, 360.0)
        asked = self.metric("rest_client_requests_total", verb="APPLY") - before
        self.figures.tell("requests of a failing resource per 5 min", asked)


def run(num: int, rest_seconds: float, num_single: int, folder: Path) -> list[str]:
    figures = Figures()
    with running_cluster(folder) as cluster, Api(cluster) as api:
        api.install(yaml.safe_load(CRD_FILE.read_text(encoding="utf-8")))
        for kind in FOREIGN:
            api.install(definition(kind))
        api.namespace(NAMESPACE)
        load.prepare(api, NAMESPACE)
        config = cluster.kubeconfig("operator")
        flags = ("--leader-elect=false", "--resync-seconds=600", "--workers=16")
        operator = OperatorProcess("a", config, NAMESPACE, *flags)
        operator.start()
        try:
            operator.wait_ready()
            bench = Bench(api, operator, figures)
            bench.many(num)
            bench.rest(rest_seconds)
            alone = bench.latencies(num_single)
            bench.neighbour(num_single, alone, full=rest_seconds >= 600.0)
        finally:
            operator.stop()
    return figures.missed


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--num", type=int, default=100, help="resources (1000: full)")
    parser.add_argument("--rest-seconds", type=float, default=30.0, help="600: full")
    parser.add_argument("--single", type=int, default=20, help="resources made one by one")
    parser.add_argument("--strict", action="store_true", help="a missed goal ends with 1")
    given = parser.parse_args(argv)
    # Else a time limit from outside leaves servers behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    now = time.strftime("%Y-%m-%d %H:%M", time.gmtime())
    cores, busy = os.cpu_count(), os.getloadavg()[0]
    print(f"{now} UTC, {given.num} resources, {cores} cores, load {busy:.1f}")
    with tempfile.TemporaryDirectory(prefix="foveal-scale-") as folder:
        missed = run(given.num, given.rest_seconds, given.single, Path(folder))
    print(f"goals missed: {'; '.join(missed) or 'none'}")
    return 1 if missed and given.strict else 0


if __name__ == "__main__":
    sys.exit(main())
