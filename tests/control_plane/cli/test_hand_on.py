"""`foveal serve`, `fetch` and `profile` hand on to the runtime, which may not be installed."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from foveal_operator.cli import main as cli
from foveal_operator.cli.local import runtime


@pytest.mark.parametrize("name", sorted(runtime.HANDED_ON))
def test_arguments_reach_the_runtime_as_they_are(name: str, monkeypatch: Any) -> None:
    called: list[list[str]] = []

    def become(file: str, command: list[str], environment: dict[str, str]) -> None:
        called.append(command)
        assert environment["FOVEAL_PROGRAM"] == "foveal", "messages name what was typed"
        raise SystemExit(0)

    monkeypatch.setattr(runtime.os, "execvpe", become)
    with pytest.raises(SystemExit):
        cli.main([name, "org/model", "--help"])
    assert called == [[sys.executable, "-m", "foveal_runtime", name, "org/model", "--help"]]


def test_without_the_runtime_it_is_one_line(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(runtime, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "/nowhere")
    assert cli.main(["serve", "org/model"]) == 2
    assert capsys.readouterr().err == (
        "foveal: foveal-runtime is not installed here; pip install "
        "'foveal-runtime[frontend,engine]'\n"
    )


def test_an_interrupt_of_the_first_moment_is_no_traceback(monkeypatch: Any) -> None:
    """Of the one in which the arguments' parser is made."""

    def interrupted() -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "parser", interrupted)
    assert cli.main(["serve", "org/model"]) == 130
