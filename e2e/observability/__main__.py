"""Runs every query of every dashboard and rule; says which return nothing, and fails on any.

    python -m e2e.observability --prometheus http://127.0.0.1:9090 [--namespace models]
        [--resource qwen] [--allow FILE] [--seconds 120]

Dashboards and the operator's rules are those of this tree; a resource's rules are filled in for
--namespace and --resource. FILE holds, one a line, beginnings of places (as printed) that need not
return data, each with its reason after a `#`; one that returns data all the same is an error, so
the list cannot rot. Needs nothing but a Prometheus that has scraped for a while under load.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from e2e.observability.queries import Ask, of_dashboard, of_rules
from foveal_operator.observability import (
    operator_rule_groups,
    resource_rule_groups,
)
from tests.support.observability_files import FILES


class Prometheus:
    """The HTTP API at one address."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")

    def num_series(self, expr: str, seconds: float, step: float) -> tuple[int, int]:
        """Series that had any sample in the last `seconds`, and those with a number among them.
        Raises RuntimeError with Prometheus's words when it refuses the query."""
        now = time.time()
        form = {"query": expr, "start": now - seconds, "end": now, "step": step}
        body = urllib.parse.urlencode(form).encode()
        request = urllib.request.Request(f"{self._url}/api/v1/query_range", body)
        try:
            with urllib.request.urlopen(request, timeout=30) as reply:
                answer = json.load(reply)
        except urllib.error.HTTPError as error:
            raise RuntimeError(error.read().decode(errors="replace")[:300]) from error
        series: list[dict[str, Any]] = answer["data"]["result"]
        numbers = sum(any(math.isfinite(float(v)) for _, v in one["values"]) for one in series)
        return len(series), numbers


def asks(namespace: str, resource: str, window: str) -> list[Ask]:
    """All there is to ask. Rates in rules keep their own windows."""
    variables = {
        "installation": ".*",
        "__rate_interval": window,
        "namespace": namespace or ".*",
        "resource": resource or ".*",
        "pod": ".*",
    }
    found: list[Ask] = []
    for name, text in FILES.items():
        found += of_dashboard(name, text, variables)
    rules = yaml.safe_dump(list(operator_rule_groups()), width=1 << 20)
    anywhere = rules.replace('="@installation@"', '=~".*"').replace('="@lease@"', '=~".*"')
    found += of_rules("operator's rules", yaml.safe_load(anywhere))
    tokens = yaml.safe_dump(list(resource_rule_groups()), width=1 << 20)
    filled = tokens.replace("@namespace@", namespace).replace("@resource@", resource)
    found += of_rules("resource's rules", yaml.safe_load(filled))
    return found


def allowed(file: str) -> list[str]:
    lines = Path(file).read_text(encoding="utf-8").splitlines() if file else []
    bare = [line.partition("#")[0].strip() for line in lines]
    return [line for line in bare if line]


def verdict(found: Iterable[tuple[Ask, int]], allow: list[str]) -> list[str]:
    """What is wrong: places that returned nothing, and exceptions that no longer are one."""
    silent = {f"{ask.where}\n    {ask.expr}" for ask, count in found if not count}
    excused = {text for text in silent if any(text.startswith(start) for start in allow)}
    idle = [start for start in allow if not any(text.startswith(start) for text in silent)]
    wrong = [f"returns nothing: {text}" for text in sorted(silent - excused)]
    return wrong + [f"is excused and returns data: {start}" for start in idle]


def main() -> int:
    parser = argparse.ArgumentParser(prog="e2e.observability", description=__doc__)
    parser.add_argument("--prometheus", required=True)
    parser.add_argument("--namespace", default="")
    parser.add_argument("--resource", default="")
    parser.add_argument("--allow", default="")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--window", default="1m", help="$__rate_interval")
    args = parser.parse_args()
    prometheus = Prometheus(args.prometheus)
    found: list[tuple[Ask, int]] = []
    without_number = []
    for ask in asks(args.namespace, args.resource, args.window):
        try:
            count, numbers = prometheus.num_series(ask.expr, args.seconds, args.seconds / 24)
        except RuntimeError as error:
            print(f"refused: {ask.where}\n    {ask.expr}\n    {error}")
            return 1
        found.append((ask, count))
        if count and not numbers:
            without_number.append(ask)
    for ask in without_number:
        print(f"only NaN, for want of events: {ask.where}")
    wrong = verdict(found, allowed(args.allow))
    print("\n".join(wrong))
    num_good = sum(1 for _, count in found if count)
    print(f"{num_good} of {len(found)} queries return data; {len(without_number)} only NaN")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
