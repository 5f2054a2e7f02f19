"""`foveal completion`: the scripts load, and bash really completes."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from foveal_operator.cli import main as cli
from foveal_operator.common import errors as cli_errors


def script(shell: str, capsys: Any) -> str:
    assert cli.main(["completion", shell]) == 0
    return str(capsys.readouterr().out)


def complete(text: str, *words: str) -> list[str]:
    """What bash offers for the last word."""
    line = f"{shlex.join(words[:-1])} {words[-1]}"
    code = f"{text}\nCOMP_LINE={shlex.quote(line)}; COMP_POINT={len(line)}; COMP_TYPE=9\n"
    code += f'_python_argcomplete {words[0]}; printf "%s\\n" "${{COMPREPLY[@]}}"'
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    out = subprocess.run(
        ["bash", "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PATH": path},
    )
    assert out.stderr == ""
    return out.stdout.split()


@pytest.mark.skipif(not shutil.which("bash"), reason="bash is not installed")
def test_bash_completes_commands_options_choices_and_files(capsys: Any, tmp_path: Any) -> None:
    text = script("bash", capsys)
    assert complete(text, "foveal", "do") == ["doctor"]
    assert complete(text, "foveal", "wait", "--keep") == ["--keep-waiting"]
    assert complete(text, "foveal", "wait", "--timeout", "") == []
    assert complete(text, "foveal", "serve", "--kv-c") == ["--kv-cache"]
    assert complete(text, "foveal", "serve", "m", "--ipc-type", "s") == ["shm"]
    assert complete(text, "foveal", "bench", "--sav") == ["--save-trace"]
    assert complete(text, "foveal-runtime", "pro") == ["profile"]
    assert complete(text, "foveal-runtime", "serve", "m", "--ipc-type", "s") == ["shm"]
    (tmp_path / "mmi.yaml").write_text("")
    assert complete(text, "foveal", "plan", "-f", f"{tmp_path}/m") == [f"{tmp_path}/mmi.yaml"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_script_parses_in_its_shell(shell: str, capsys: Any) -> None:
    text = script(shell, capsys)
    assert "kubectl-foveal" in text
    assert "foveal-runtime" in text
    if not shutil.which(shell):
        pytest.skip(f"{shell} is not installed")
    subprocess.run([shell, "-n"], input=text, text=True, check=True, timeout=60)


def offered(*words: str) -> tuple[list[str], str]:
    """What kubectl is told: candidates without their meanings, and the directive."""
    program = Path(sys.executable).parent / "kubectl_complete-foveal"
    out = subprocess.run([program, *words], capture_output=True, text=True, check=True)
    assert out.stderr == ""
    *lines, directive = out.stdout.splitlines()
    return [line.partition("\t")[0] for line in lines], directive


def test_kubectl_completes_commands_options_choices_and_files(tmp_path: Path) -> None:
    names, directive = offered("")
    assert {"plan", "up", "status", "wait", "completion"} <= set(names)
    assert directive == ":4"
    assert offered("status", "-o", "") == (["table", "json", "yaml"], ":4")
    assert offered("wait", "qwen", "--keep") == (["--keep-waiting"], ":4")
    assert offered("completion", "f") == (["fish"], ":4")
    assert offered("serve", "model", "--kv-c") == (["--kv-cache"], ":4")
    (tmp_path / "folder").mkdir()
    (tmp_path / "mmi.yaml").write_text("")
    assert offered("plan", "-f", f"{tmp_path}/m") == ([f"{tmp_path}/mmi.yaml"], ":4")
    assert offered("plan", "-f", f"{tmp_path}/f") == ([f"{tmp_path}/folder/"], ":6")
    assert offered("status", "n") == ([], ":4"), "a resource's name is no file's"
    assert offered("nonsense", "x") == ([], ":4")
    root = Path(__file__).parents[3]
    scripts = tomllib.loads((root / "operator/pyproject.toml").read_text())["project"]["scripts"]
    assert scripts["kubectl_complete-foveal"] == "foveal_operator.cli.main:complete"


def test_the_docs_name_every_command_and_exit_code() -> None:
    text = (Path(__file__).parents[3] / "docs/reference/cli.md").read_text(encoding="utf-8")
    names, _ = offered("")
    commands = {name for name in names if not name.startswith("-")}
    assert len(commands) > 7
    for command in commands:
        assert f"`foveal {command}" in text, command
    codes = [value for name, value in vars(cli_errors).items() if name.startswith("EXIT_")]
    for code in filter(lambda value: isinstance(value, int), codes):
        assert f"\n| {code} | " in text, code


def test_help_names_every_command_and_fits_80_columns(capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as ended:
        cli.main(["--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert "\n    completion  a script" in out, "the help of each command stands beside it"
    for name in ("plan", "up", "status", "budget", "wait", "dashboard", "doctor", "completion"):
        assert f"\n    {name}" in out
        with pytest.raises(SystemExit):
            cli.main([name, "--help"])
        text = capsys.readouterr().out
        assert max(map(len, text.splitlines())) <= 80
        assert "exit codes:" in text or name == "completion"
