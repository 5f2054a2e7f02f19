"""Runbooks: one for each alert, and their commands name things that exist.

What a command prints needs a cluster; here every line is parsed by the shell, and programs, verbs,
kinds, ports, labels and metric names are compared with what the code makes.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from foveal_operator.cli import main as cli
from foveal_operator.observability.alerts import ALERTS
from foveal_operator.observability.promql import KNOWN
from tests.support import regenerate
from tests.support.samples import LEGAL

RUNBOOKS = regenerate.ROOT / "docs" / "runbooks"
PAGES = sorted(path for path in RUNBOOKS.glob("Foveal*.md"))
KINDS = {
    "mmi", "pods", "events", "lease", "hpa", "networkpolicies", "podmonitors", "deployments",
    "statefulsets", "configmaps", "services",
}  # fmt: skip
SERIES = {
    name + suffix
    for name, metric in KNOWN.items()
    for suffix in {"counter": ("_total",), "gauge": ("",),
                   "histogram": ("_bucket", "_sum", "_count")}[metric.kind]
}  # fmt: skip
FOREIGN = {"apiserver_flowcontrol_rejected_requests_total"}


def commands(page: Path) -> list[str]:
    text = page.read_text(encoding="utf-8")
    [block] = re.findall(r"```sh\n(.*?)```", text, flags=re.S)
    return [line for line in block.splitlines() if line]


def test_each_alert_has_one_page() -> None:
    assert {page.stem for page in PAGES} == {alert.name for alert in ALERTS}
    index = (RUNBOOKS / "README.md").read_text(encoding="utf-8")
    for alert in ALERTS:
        assert f"- [{alert.name}]({alert.name}.md) ({alert.severity}, after {alert.hold})" in index


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_name_what_exists(page: Path) -> None:
    lines = commands(page)
    checked = subprocess.run(["bash", "-n"], input="\n".join(lines), text=True, timeout=60)
    assert checked.returncode == 0
    given = set(re.findall(r"\b([A-Z_]{4,})=", lines[0]))
    for line in lines:
        for name in re.findall(r"\$([A-Z_]+)", line):
            assert name in given, f"{name} is not set in the first line"
        for command in _pipeline(line):
            _check(command)


def _pipeline(line: str) -> list[list[str]]:
    found: list[list[str]] = [[]]
    for word in shlex.split(line):
        if word == "|":
            found.append([])
        elif word != "&":
            found[-1].append(word)
    return found


def _check(command: list[str]) -> None:
    program, *rest = command
    if program == "grep":
        pattern = re.compile(rest[-1].replace("|", "|^") if "(" not in rest[-1] else rest[-1])
        if ":" not in rest[-1] or "vllm:" in rest[-1]:
            hits = [name for name in SERIES | FOREIGN if pattern.search(name)]
            assert hits, f"{rest[-1]} finds no metric"
    elif program == "kubectl":
        _check_kubectl(rest)
    elif program == "foveal":
        cli.parser().parse_args(rest)  # ends the test where the command does not exist
    else:
        assert program == "export", program


def _check_kubectl(words: list[str]) -> None:
    if words[0] == "-n":
        words = words[2:]
    verb, *rest = words
    if verb == "get" and rest[0] == "--raw":
        _check_raw(rest[1])
    elif verb in {"get", "describe"}:
        assert set(rest[0].split(",")) <= KINDS, rest[0]
    elif verb == "exec":
        assert rest[0] == "$NAME-engine-0"
        assert ":5580/metrics" in rest[-1]
    else:
        assert verb == "logs", verb


def _check_raw(path: str) -> None:
    if path.startswith("/api/v1/namespaces/"):
        wanted = regenerate.wanted(LEGAL["minimal"])
        ports = {
            (body["metadata"]["name"], port["port"])
            for body in wanted.of_kind("Service")
            for port in body["spec"]["ports"]
        }
        assert path.endswith("/services/$NAME:8000/proxy/metrics")
        assert ("qwen", 8000) in ports
    else:
        assert path in {"/readyz", "/metrics"}


def test_labels_in_commands_are_labels_of_pods() -> None:
    [engine] = regenerate.wanted(LEGAL["minimal"]).of_kind("StatefulSet")
    labels = set(engine["spec"]["template"]["metadata"]["labels"])
    for page in PAGES:
        for line in commands(page):
            for selector in re.findall(r" -l (\S+)", line):
                for pair in selector.split(","):
                    assert pair.split("=")[0] in labels, f"{page.name}: {selector}"
