"""Commands that read a cluster, against servers that answer what no API server does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from foveal_operator.api.crd import PLURAL
from foveal_operator.cli import main as cli
from foveal_runtime.plan.local import free_port
from tests.support.loopback_server import LoopbackHandler, LoopbackServer

ROOT = Path(__file__).parents[3]
COMMANDS = [
    ["status"], ["status", "tiny"], ["budget", "tiny"], ["wait", "tiny", "--timeout", "0"],
    ["doctor"], ["plan", "-f", str(ROOT / "examples/mmi-cpu-laptop.yaml"), "--server"],
]  # fmt: skip
WRONG: list[Any] = [
    {}, [], 7, "text", {"metadata": None}, {"metadata": {}}, {"metadata": {"name": 7}},
    {"items": [7]}, {"items": 7}, {"items": [{}]}, {"items": [{"metadata": {}}]},
    {"metadata": {"name": "tiny", "labels": []}}, {"metadata": {"name": "tiny"}, "status": "?"},
    {"metadata": {"name": "tiny", "namespace": "models"}},
    {"metadata": {"name": "tiny"}}, {"items": [{"metadata": {"name": "tiny"}}]}, {"items": None},
]  # fmt: skip


class Answers(LoopbackServer):
    """The same body to every request; `lists`: another one where objects are listed."""

    def __init__(self) -> None:
        super().__init__(_Handler)
        self.body, self.lists = b"", b""


class _Handler(LoopbackHandler):
    server: Answers

    def do_GET(self) -> None:
        is_list = self.path.partition("?")[0].rpartition("/")[2] in (PLURAL, "deployments")
        self.send(200, (self.server.lists if is_list else b"") or self.server.body)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self.do_GET()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Answers]:
    with Answers().running() as running:
        config = {
            "apiVersion": "v1", "kind": "Config", "current-context": "x",
            "clusters": [{"name": "c", "cluster": {"server": running.url}}],
            "users": [{"name": "u", "user": {}}],
            "contexts": [{"name": "x", "context": {
                "cluster": "c", "user": "u", "namespace": "models"}}],
        }  # fmt: skip
        (tmp_path / "config").write_text(yaml.safe_dump(config))
        yield running


def said(arguments: list[str], capsys: Any) -> tuple[int, str]:
    code = cli.main(arguments)
    found = capsys.readouterr()
    return code, found.out + found.err


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_answers_of_no_api_server_end_in_words(
    server: Answers, tmp_path: Path, capsys: Any, command: list[str]
) -> None:
    """Objects without metadata, and items that are no objects, were tracebacks."""
    for lists in (b"", b'{"items": []}'):
        for wrong in WRONG:
            server.body, server.lists = json.dumps(wrong).encode(), lists
            said([*command, f"--kubeconfig={tmp_path}/config"], capsys)


@pytest.mark.parametrize(
    ("command", "wrong", "what"),
    [
        (["status", "tiny"], {}, "Object missing required field `metadata`"),
        (["status", "tiny"], {"metadata": {"name": "tiny"}},
         "Object missing required field `namespace` - at `$.metadata`"),
        (["status"], {"items": [7]}, "Expected `object`, got `int` - at `$.items[0]`"),
        (["status"], {"items": [{"metadata": {}}]},
         "Object missing required field `name` - at `$.items[0].metadata`"),
        (["budget", "tiny"], {"metadata": {"name": "tiny", "namespace": "models"}, "status": "?"},
         "Expected `object`, got `str` - at `$.status`"),
    ],
)  # fmt: skip
def test_what_is_wrong_and_where_to_look_is_one_line(
    server: Answers, tmp_path: Path, capsys: Any, command: list[str], wrong: Any, what: str
) -> None:
    server.body = json.dumps(wrong).encode()
    code, text = said([*command, f"--kubeconfig={tmp_path}/config"], capsys)
    assert code == 4
    (line,) = text.splitlines()
    assert line.startswith("foveal: GET /apis/foveal.dev/v1alpha1/namespaces/models/")
    assert line.endswith(
        f": {server.url} answers no Kubernetes object ({what}): check that the kubeconfig's "
        "context names a Kubernetes API server"
    )


def test_a_server_that_is_not_there(server: Answers, tmp_path: Path, capsys: Any) -> None:
    """The line repeated address and port in the words of the client library."""
    free = free_port()
    file = tmp_path / "config"
    file.write_text(file.read_text().replace(server.url, f"http://127.0.0.1:{free}"))
    code, text = said(["status", "tiny", f"--kubeconfig={file}"], capsys)
    assert (code, text) == (
        4,
        f"foveal: http://127.0.0.1:{free} does not answer: Failed to establish a new connection: "
        "[Errno 111] Connection refused\n",
    )


def test_a_kubeconfig_variable_that_names_no_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    """It was told to set KUBECONFIG."""
    monkeypatch.setenv("KUBECONFIG", f"{tmp_path}/no")
    code, text = said(["status", "tiny"], capsys)
    assert (code, text) == (
        4,
        f"foveal: KUBECONFIG is {tmp_path}/no, and there is no such file: correct it, or give "
        "--kubeconfig\n",
    )


@pytest.mark.parametrize("name", ["a b", "..", "a/b", "a?x=1", "ä", "a\n", "-a", "a" * 254])
@pytest.mark.parametrize("command", [["status"], ["budget"], ["wait", "--timeout=0"]])
def test_what_is_no_name_is_not_asked_for(
    server: Answers, tmp_path: Path, capsys: Any, command: list[str], name: str
) -> None:
    """Spaces were a traceback, and .. led to another object."""
    for arguments in (["--", name], [f"--namespace={name}", "tiny"]):
        code, text = said([*command, f"--kubeconfig={tmp_path}/config", *arguments], capsys)
        assert code == 4
        assert text.startswith(f"foveal: {name!r} is no name of Kubernetes: ")
