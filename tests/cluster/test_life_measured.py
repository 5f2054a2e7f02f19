"""What Prometheus has seen of a resource's life: every query of dashboards and rules has an answer.

Prometheus has watched since test_life.py began: rolls, lost pods, a kill. Here a mixed load comes
on top.
"""

from __future__ import annotations

import json
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from e2e.observability.load import Load
from tests.support.node import commands

pytestmark = pytest.mark.cluster
ALLOW = Path(__file__).parents[1] / "support/node/silent-queries.txt"
NUM_ANSWERS = 150


def asked(prometheus: str, path: str) -> commands.Obj:
    with urllib.request.urlopen(f"{prometheus}/api/v1/{path}", timeout=20) as answer:
        found: commands.Obj = json.load(answer)["data"]
    return found


@pytest.fixture(scope="module")
def loaded(tiny: str, prometheus: str) -> None:
    """New and known pictures, text, and pictures that are none, until caches evict and each pod has
    been scraped several times."""
    with Load([tiny]) as load:
        started = time.monotonic()

        def is_enough() -> bool:
            # Rates are taken over a minute.
            return (
                load.num_answers >= NUM_ANSWERS
                and load.num_refusals > 1
                and time.monotonic() - started > 75
            )

        commands.until("a mixed load", is_enough, 300)
    print(f"{load.num_answers} answers, {load.num_refusals} refusals")


def test_every_pod_is_scraped_as_its_podmonitor_says(prometheus: str, loaded: None) -> None:
    targets = asked(prometheus, "targets?state=active")["activeTargets"]
    scraped = {item["labels"]["pod"]: item for item in targets if item["health"] == "up"}
    tiny = {*commands.pods("frontend"), *commands.pods("engine")}
    operators = commands.get("pods", "", "foveal-system")["items"]
    assert tiny | {pod["metadata"]["name"] for pod in operators} <= scraped.keys()
    for name in tiny:
        labels = scraped[name]["labels"]
        assert labels["namespace"] == "default"
        assert labels["resource"] == "tiny"
        assert labels["role"] in name
        assert labels["revision"]


def test_every_rule_is_evaluated_without_an_error(prometheus: str, loaded: None) -> None:
    groups = asked(prometheus, "rules")["groups"]
    rules = {rule["name"]: rule for group in groups for rule in group["rules"]}
    assert {"FovealUnavailable", "FovealOperatorNoLeader"} <= rules.keys()
    assert {name: rule.get("lastError") for name, rule in rules.items()} == dict.fromkeys(rules)
    assert {rule["health"] for rule in rules.values()} == {"ok"}


def test_every_query_of_dashboards_and_rules_returns_data(prometheus: str, loaded: None) -> None:
    said = commands.run(
        sys.executable, "-m", "e2e.observability", "--prometheus", prometheus,
        "--namespace", "default", "--resource", "tiny", "--allow", str(ALLOW),
        "--seconds", "1200", seconds=300,
    )  # fmt: skip
    print(said.splitlines()[-1])


def test_the_page_without_grafana_shows_every_panel(prometheus: str, loaded: None) -> None:
    page = commands.ROOT / "run/page.html"
    program = Path(sys.executable).with_name("foveal")
    commands.run(str(program), "dashboard", "--prometheus", prometheus, "tiny", "-n", "default",
            "--since", "20m", "--out", str(page))  # fmt: skip
    text = page.read_text(encoding="utf-8")
    assert text.count("nothing in this time") == 0
    for name in (*commands.pods("frontend"), *commands.pods("engine")):
        assert name in text
