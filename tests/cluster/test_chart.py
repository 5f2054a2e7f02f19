"""The chart as a user meets it: `helm test`, the commands of its notes, an upgrade."""

from __future__ import annotations

import json
import re

import pytest

from tests.support.node import commands

pytestmark = pytest.mark.cluster


def notes(namespace: str) -> list[str]:
    """The indented commands of NOTES.txt, with their here-documents."""
    text = commands.run("helm", "get", "notes", "foveal", "-n", namespace)
    parts = re.split(r"^\d\. .*$", text, flags=re.MULTILINE)[1:]
    return ["\n".join(line[3:] for line in part.splitlines()).strip() for part in parts]


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
    """All but the wait, which would be for a real model's download; its form is checked."""
    apply, wait, ask = notes(operator)
    commands.run("bash", "-euo", "pipefail", "-c", apply)
    try:
        message = commands.until(
            "the operator takes it up", lambda: commands.condition("qwen", "SpecAccepted", operator)
        )
        assert message["status"] == "True", message
        first, table = wait.split("; ")
        assert "--for=condition=Ready" in first
        shorter = first.replace("condition=Ready --timeout=30m", "condition=SpecAccepted")
        commands.run("bash", "-c", shorter)
        assert "qwen" in commands.run("bash", "-c", table)
        assert "/v1/models" in ask
    finally:
        commands.kubectl("delete", "mmi", "qwen", "-n", operator, "--timeout=60s")


def test_an_upgrade_with_the_same_values_changes_nothing(operator: str) -> None:
    command = ("get", "deployment", "foveal-operator", "-n", operator, "-o", "json")
    before = json.loads(commands.kubectl(*command))["metadata"]["generation"]
    commands.run("helm", "upgrade", "foveal", "charts/foveal", "-n", operator, "--reuse-values",
            "--wait", "--timeout=90s", seconds=120)  # fmt: skip
    assert json.loads(commands.kubectl(*command))["metadata"]["generation"] == before
