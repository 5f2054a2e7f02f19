"""The chart as a user meets it: `helm test`, the commands of its notes, an upgrade."""

from __future__ import annotations

import json
import re

import pytest

from tests.support.node import commands

pytestmark = pytest.mark.cluster


def test_helm_test_passes(operator: str) -> None:
    commands.run("helm", "test", "foveal", "-n", operator, "--timeout=90s", seconds=120)


def test_the_operator_runs_with_the_charts_role_and_nothing_is_forbidden(operator: str) -> None:
    """Its log would say which verb the generated Role lacks."""

    def logs() -> str:
        label = "app.kubernetes.io/name=foveal-operator"
        return commands.kubectl("logs", "-n", operator, "-l", label, "--tail=-1", "--prefix")

    commands.until("one of the two leads", lambda: "leading" in logs(), 60)
    log = logs()
    assert "is forbidden" not in log
    assert "cannot list resource" not in log


def test_the_commands_of_the_notes_run_as_printed(operator: str) -> None:
    """One after the other, as a newcomer would copy them."""
    try:
        said = [
            commands.run("bash", "-euo", "pipefail", "-c", command, seconds=660)
            for command in commands.of_notes(operator)
        ]
        assert len(said) == 4
        _, waited, asked, explained = said
        assert re.search(r"^foveal-system +tiny +True ", waited, re.M), waited
        assert '"id":"tiny-vlm"' in asked.replace(" ", ""), asked
        assert "uri" in explained
    finally:
        commands.kubectl("delete", "mmi", "tiny", "-n", operator, "--timeout=60s")


def test_an_upgrade_with_the_same_values_changes_nothing(operator: str) -> None:
    command = ("get", "deployment", "foveal-operator", "-n", operator, "-o", "json")
    before = json.loads(commands.kubectl(*command))["metadata"]["generation"]
    commands.run("helm", "upgrade", "foveal", "charts/foveal", "-n", operator, "--reuse-values",
            "--wait", "--timeout=90s", seconds=120)  # fmt: skip
    assert json.loads(commands.kubectl(*command))["metadata"]["generation"] == before
