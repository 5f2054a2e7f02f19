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
    name + suffix: metric
    for name, metric in KNOWN.items()
    for suffix in {"counter": ("_total",), "gauge": ("",),
                   "histogram": ("_bucket", "_sum", "_count")}[metric.kind]
}  # fmt: skip
FOREIGN = {"apiserver_flowcontrol_rejected_requests_total"}
OPTIONAL = {"podmonitors"}
"""Kinds that a cluster may lack: kubectl then shows nothing of what else it was asked for."""
SAID_BY_OTHERS = {"forbidden"}  # the API server, when a right is missing


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
    given = set(re.findall(r"\b([A-Z_]{3,})=", lines[0]))
    for line in lines:
        for name in re.findall(r"\$([A-Z_]+)", line):
            assert name in given, f"{name} is not set in the first line"
        [first, *rest] = _pipeline(line)
        _check(first)
        role = "engine" if "exec" in first else "frontend" if "/proxy/metrics" in line else ""
        for command in rest:
            _check_grep(command, role)


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
    if program == "kubectl":
        _check_kubectl(rest)
    elif program == "foveal":
        cli.parser().parse_args(rest)  # ends the test where the command does not exist
    else:
        assert program == "export", program


def _check_grep(command: list[str], role: str) -> None:
    """Each name that is looked for is one that the process exports that was asked."""
    assert command[0] == "grep", command
    for pattern in _alternatives(command[-1]) if role else ():
        found = [metric for name, metric in SERIES.items() if name.startswith(pattern)]
        assert [metric for metric in found if role in metric.roles], f"{role}: no {pattern}"
    if not role and "_total" in command[-1]:
        assert command[-1] in FOREIGN


def _alternatives(pattern: str) -> list[str]:
    """Of `a_(b|c)_d|e`: a_b_d, a_c_d, e."""
    found = re.search(r"\(([^()]*)\)", pattern)
    if found is None:
        return pattern.split("|")
    rest = (pattern[: found.start()], pattern[found.end() :])
    return [one for part in found[1].split("|") for one in _alternatives(part.join(rest))]


def _check_kubectl(words: list[str]) -> None:
    if words[0] == "-n":
        words = words[2:]
    verb, *rest = words
    if verb == "get" and rest[0] == "--raw":
        _check_raw(rest[1])
    elif verb in {"get", "describe"}:
        kinds = set(rest[0].split(","))
        assert kinds <= KINDS, rest[0]
        assert len(kinds) == 1 or not kinds & OPTIONAL, rest[0]
    elif verb == "exec":
        assert rest[0] in {"$NAME-engine-0", "$POD"}
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


def test_words_that_a_log_shows_are_logged() -> None:
    """A page sent its reader after a word that no process writes any more."""
    folders = (regenerate.ROOT / part for part in ("runtime/src", "operator/src"))
    files = [path for folder in folders for path in folder.rglob("*.py")]
    sources = "".join(path.read_text(encoding="utf-8") for path in files)
    named = set()
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for line in re.findall(r"Log lines with ((?:`[^`]+`(?: or |, | \()?)+)", text):
            named |= set(re.findall(r"`([^`]+)`", line))
        named |= set(re.findall(r"`([^`]+)` in the log", text))
    assert len(named) > 3
    assert [word for word in named - SAID_BY_OTHERS if word not in sources] == []
