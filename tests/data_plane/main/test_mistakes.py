"""Mistakes of a person who types `foveal serve` or `bench`, each with the line that answers it.

Nothing is loaded for any of these: a model is files that the tests write. The hub's mistakes are in
test_serve_hub.py, those with signals in test_serve_signals.py.
"""

from __future__ import annotations

import errno
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from foveal_runtime.main import cli
from foveal_runtime.plan.errors import file_problem
from foveal_runtime.plan.machine import Machine
from tests.support.checkpoint_files import GIB, checkpoint, write_profile
from tests.support.markdown import ROOT
from tests.support.mistakes import FILES, OPTIONS, SAY
from tests.support.openai_server import OpenAIServer


def refused(said: str) -> tuple[int, str]:
    return 2, f"foveal-runtime: {said}\n"


class Desk:
    """Where a person sits: a folder, an environment, and what the command answered."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, capsys: Any) -> None:
        self.folder, self.patch, self._capsys = folder, patch, capsys
        self.model = checkpoint(folder / "model")

    def serve(self, *arguments: str) -> tuple[int, str]:
        """(exit code, standard error)."""
        return self.run("serve", *arguments)

    def run(self, *arguments: str) -> tuple[int, str]:
        try:
            code = cli.main(list(arguments))
        except SystemExit as ended:
            code = int(ended.code or 0)
        captured = self._capsys.readouterr()
        return code, captured.err.replace(str(self.folder), "TMP")

    def give_devices(self, *sizes: int) -> None:
        listed = {f"GPU-{number}": size for number, size in enumerate(sizes)}
        self.patch.setattr("foveal_runtime.plan.machine._device_sizes", lambda: listed)

    def give_memory(self, size: int, *devices: int) -> None:
        here = Machine(memory_bytes=size, available_bytes=size, cpus=4.0, devices=devices)
        self.patch.setattr("foveal_runtime.plan.machine.look", lambda: here)


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Desk:
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.startswith(("HF_", "FOVEAL_", "CUDA_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    desk = Desk(tmp_path, monkeypatch, capsys)
    desk.give_devices()
    return desk


@pytest.mark.parametrize(("arguments", "said"), OPTIONS, ids=lambda v: " ".join(v or ["-"])[:40])
def test_options(desk: Desk, arguments: list[str], said: str | None) -> None:
    code, err = desk.serve(*arguments)
    assert code == 2
    if said is None:
        said = err.strip()
        assert said.startswith(f"{SAY}: cannot listen on no-such-host.invalid, port 8000: ")
    assert err == f"{said}\n"


def test_an_option_of_another_command_is_not_suggested(desk: Desk) -> None:
    """`profile` has no --kv-cache, and the help of the program alone lists no options."""
    code, err = desk.run("profile", "model", "--kvcache", "4Gi")
    assert (code, err) == (
        2,
        "foveal-runtime profile: unrecognized arguments: --kvcache 4Gi; see foveal-runtime profile "
        "--help\n",
    )


@pytest.mark.parametrize("option", ["--api-key-file", "--admin-key-file", "--injection-key-file"])
def test_a_file_without_a_key(desk: Desk, option: str) -> None:
    """The frontend said so, once the model was profiled and the engine had begun to load it."""
    (desk.folder / "keys").write_text("# none yet\n")
    said = refused("API key file keys: it holds no key")
    assert desk.serve("model", "--port", "0", option, "keys") == said


@pytest.mark.parametrize(
    ("model", "make", "said"), FILES, ids=lambda v: v[:50] if isinstance(v, str) else ""
)
def test_models(desk: Desk, model: str, make: Callable[[Path], Any], said: str) -> None:
    make(desk.folder)
    code, err = desk.serve(model, "--port", "0")
    assert code == 2
    if not said:
        assert err.count("\n") == 1
        assert err.startswith(f"{SAY}: model bad: weights are quantised (")
        assert "which is not supported" in err
    else:
        assert err == f"{SAY}: {said}\n"


ALL_AT_ONCE = """
import contextlib, io, json, os, sys
from pathlib import Path
from foveal_runtime.main import cli
from tests.support.checkpoint_files import checkpoint, write_profile
from tests.support.mistakes import FILES, OPTIONS
os.chdir(sys.argv[1])
checkpoint(Path("model"))
cases = [(arguments, lambda folder: None) for arguments, _ in OPTIONS]
cases += [([model, "--port", "0"], make) for model, make, _ in FILES]
cases += [(["model", "--port", "0", "--profile", write_profile(Path(sys.argv[1])),
           "--kv-cache", "64Ti"],
           lambda folder: None)]
codes, out = [], io.StringIO()
with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
    for number, (arguments, make) in enumerate(cases):
        folder = Path(sys.argv[1], str(number))
        folder.mkdir()
        os.chdir(folder)
        checkpoint(Path("model"))
        make(folder)
        try:
            codes.append(cli.main(["serve", *arguments]))
        except SystemExit as ended:
            codes.append(ended.code)
slow = {"torch", "transformers", "fastapi", "PIL", "numpy"} & sys.modules.keys()
print(json.dumps([codes, sorted(slow), out.getvalue()]))
"""


def test_nothing_that_takes_seconds_is_imported_for_any_of_these(tmp_path: Path) -> None:
    """Nor is another process of ours started: that would say that it reads the model's costs."""
    done = subprocess.run(
        [sys.executable, "-c", ALL_AT_ONCE, str(tmp_path)], capture_output=True, text=True,
        check=True, timeout=120, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    codes, slow, out = json.loads(done.stdout)
    assert len(codes) > 35
    assert codes == [2] * (len(codes) - 1) + [3]
    assert (slow, out) == ([], "")


def test_unknown_options_of_a_file_and_of_the_environment(desk: Desk) -> None:
    (desk.folder / "a.yaml").write_text("prot: 8000\n")
    assert desk.serve("model", "--config", "a.yaml") == refused(
        "--config a.yaml: unknown option prot (did you mean port?)"
    )
    (desk.folder / "b.yaml").write_text("no-prefix-caching: perhaps\n")
    assert desk.serve("model", "--config", "b.yaml") == refused(
        "--config b.yaml: no-prefix-caching is perhaps: write true or false"
    )
    (desk.folder / "b.yaml").write_text("name: 2024-99-99\n")
    assert desk.serve("model", "--config", "b.yaml") == refused(
        "--config b.yaml is not YAML: month must be in 1..12"
    )
    (desk.folder / "c.yaml").write_text("port: [\n")
    code, err = desk.serve("model", "--config", "c.yaml")
    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith(f"{SAY}: --config c.yaml is not YAML: ")
    desk.patch.setenv("FOVEAL_SERVE_KV_CASHE", "4Gi")
    assert desk.serve("model") == refused(
        "FOVEAL_SERVE_KV_CASHE: unknown option kv-cashe (did you mean kv-cache?)"
    )


def test_a_taken_port_before_anything_else(desk: Desk) -> None:
    """A second start is this one, too. It used to print "ready" while the first held the port."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        code, err = desk.serve("org/not-asked-for", "--port", str(taken))
    assert code == 2
    assert re.fullmatch(
        f"{SAY}: port {taken} of 127.0.0.1 is in use by another program: stop it, or choose "
        r"another port, for example --port \d+\n", err)  # fmt: skip


def test_devices(desk: Desk) -> None:
    desk.give_devices(24 * GIB)
    desk.patch.setattr("foveal_runtime.main.local.sizing._torch_version", lambda: "2.15.0")
    assert desk.serve("model", "--engines", "2", "--tensor-parallel", "2") == refused(
        "4 devices are asked for (--engines x --tensor-parallel) and this machine has "
        "1: lower one of them, or use --device cpu"
    )
    desk.patch.setattr("foveal_runtime.main.local.sizing._torch_version", lambda: "2.15.0+cpu")
    assert desk.serve("model", "--device", "cuda") == refused(
        "--device cuda: torch 2.15.0+cpu is a build for CPUs: install one with CUDA, or "
        "use --device cpu"
    )


def test_too_little_memory_is_the_planners_word_with_our_options(desk: Desk) -> None:
    profile = write_profile(desk.folder)
    desk.give_memory(8 * GIB)
    code, err = desk.serve("model", "--port", "0", "--profile", profile)
    assert (code, err.count("\n")) == (3, 1), err
    figures, options = err.removeprefix(f"{SAY}: ").split(". Options: ")
    assert re.fullmatch(
        r"An engine needs at least [\d.]+ GiB and may use 7\.20 GiB \(--memory 0\.9\): [\d.]+ GiB "
        r"too little\. Largest items: weights 15\.00 GiB, .*", figures)  # fmt: skip
    assert options == "a smaller model, or --dtype bfloat16\n"


def test_a_profile_of_other_weights_is_refused(desk: Desk) -> None:
    profile = write_profile(desk.folder)
    argv = ["model", "--port", "0", "--profile", profile, "--quantization", "int4"]
    assert desk.serve(*argv) == (2, (
        f"{SAY}: --profile TMP/profile.json: was made with --quantization auto, and int4 "
        "is asked for: give both the same\n"
    ))  # fmt: skip


def test_a_size_that_was_given_too_large_is_named(desk: Desk) -> None:
    desk.give_memory(64 * GIB)
    argv = ["model", "--port", "0", "--profile", write_profile(desk.folder)]
    code, err = desk.serve(*argv, "--kv-cache", "64Gi")
    assert (code, err.count("\n")) == (3, 1), err
    assert "Largest items: kv 64.00 GiB, " in err
    assert err.endswith(". Options: a smaller --kv-cache\n")


def test_a_size_that_was_given_too_small_is_named(desk: Desk) -> None:
    desk.give_memory(64 * GIB)
    argv = ["model", "--port", "0", "--profile", write_profile(desk.folder)]
    assert desk.serve(*argv, "--kv-cache", "1Mi") == (3, (
        f"{SAY}: --kv-cache holds 0 tokens and one request may have 32768. Options: "
        "--kv-cache 1793Mi\n"
    ))  # fmt: skip


def test_a_device_too_small_names_options_that_help(desk: Desk) -> None:
    profile = write_profile(desk.folder)
    desk.give_memory(64 * GIB, 18 * GIB, 18 * GIB)
    desk.patch.setattr("foveal_runtime.main.local.sizing._torch_version", lambda: "2.15.0")
    code, err = desk.serve("model", "--port", "0", "--profile", profile)
    assert (code, err.count("\n")) == (3, 1), err
    option = re.search(r"Options: (--[\w-]+) (\S+)", err)
    assert option, err
    again = desk.serve(
        "model", "--port", "0", "--profile", profile, "--plan", option[1], option[2].rstrip(".")
    )
    assert again == (0, ""), (option, again)


@pytest.mark.parametrize(
    ("output", "why"),
    [("no/file", "No such file or directory"), ("model", "Is a directory"),
     ("a" * 300, "File name too long")],
)  # fmt: skip
def test_a_profile_that_cannot_be_written_is_not_made(desk: Desk, output: str, why: str) -> None:
    """It was a traceback, after the model had been read."""
    assert desk.run("profile", "model", "--output", output) == refused(f"--output {output}: {why}")


@pytest.mark.parametrize(
    "option", ["--resize-to-pixels", "--max-video-pixels", "--resize-video-to-pixels"]
)
def test_pixels_are_no_negative_number(desk: Desk, option: str) -> None:
    """It was a traceback of a square root."""
    code, said = desk.run("profile", "model", f"{option}=-5")
    assert code == 2
    assert said.startswith(f"foveal-runtime profile: argument {option}: '-5' is not a whole number")


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--max-pixels", "1" + 29 * "0", "is more than 1000000000"),
        ("--max-pixels", "0", "is not a whole number of at least 1"),
        ("--resize-to-pixels", "1000000001", "is more than 1000000000"),
        ("--max-seconds", "nan", "is not a time: give seconds, such as 90"),
        ("--max-audio-seconds", "inf", "is not a time: give seconds, such as 90"),
    ],
)
def test_limits_of_media_are_finite(desk: Desk, option: str, value: str, said: str) -> None:
    """Thirty digits of pixels were a traceback, and NaN was taken."""
    code, found = desk.run("profile", "model", option, value)
    assert code == 2
    assert found.startswith(f"foveal-runtime profile: argument {option}: {value!r} {said}")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device: free some, "
         "or name a directory on another disk (or in TMPDIR)"),
        (FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']"),
         "No usable temporary directory found in ['/tmp']: free some, or name a directory on "
         "another disk (or in TMPDIR)"),
        (PermissionError(errno.EACCES, "Permission denied", "model/config.json"),
         "model/config.json: Permission denied"),
        (ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"), ""),
    ],
)  # fmt: skip
def test_files_and_disks_that_fail_are_named(error: OSError, said: str) -> None:
    assert file_problem(error) == said


BENCH_HELP = "; see foveal-runtime bench --help"
BENCH: list[tuple[list[str], str]] = [
    (["localhost:8000"],
     "foveal-runtime: localhost:8000 is not the URL of a server: write http://HOST:PORT"),
    (["http://127.0.0.1:9"],
     "foveal-runtime: no server answers at http://127.0.0.1:9: Connection refused"),
    (["--traces", "hit-95"],
     "foveal-runtime bench: argument --traces: there is no trace 'hit-95' (did you mean hits-95?)"
     + BENCH_HELP),
    (["--traces", "text@0"],
     "foveal-runtime bench: argument --traces: 'text@0': write text@32 for 32 at a time"
     + BENCH_HELP),
    (["--rate", "0"],
     "foveal-runtime bench: argument --rate: '0' is not a number of conversations a second above 0"
     + BENCH_HELP),
    (["--image", "big"],
     "foveal-runtime bench: argument --image: 'big': write 336x336 or 1024x1024.jpeg" + BENCH_HELP),
    (["--replay", "no.jsonl"], "foveal-runtime: --replay no.jsonl: No such file or directory"),
    (["--replay", "empty"],
     'foveal-runtime: --replay empty: no requests: write {"messages": [...]} on each line'),
    (["--replay", "broken"],
     "foveal-runtime: --replay broken, line 2: Object missing required field `messages`"),
    (["--replay", "times"],
     "foveal-runtime: --replay times: line 2 has no `at` and others have: give it to all or none"),
    (["--api-key-file", "no-key"],
     "foveal-runtime: --api-key-file no-key: No such file or directory"),
    (["--api-key-file", "empty"],
     "foveal-runtime: --api-key-file empty: the file is empty: write the key on its first line"),
    (["--show", "broken"],
     "foveal-runtime: --show broken is no file of --json: Object missing required field `date`"),
    (["--plot", "bench.jpg"],
     "foveal-runtime: --plot bench.jpg: end its name with .png or .svg"),
    (["--json", "no/bench.json"],
     "foveal-runtime: --json no/bench.json: there is no directory no"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "said"), BENCH, ids=lambda v: " ".join(v)[:40])
def test_benches(desk: Desk, arguments: list[str], said: str) -> None:
    message = '{"messages": [{"role": "user", "content": "a"}]'
    (desk.folder / "empty").write_text("\n")
    (desk.folder / "broken").write_text(message + '}\n{"at": 1}\n')
    (desk.folder / "times").write_text(message + ', "at": 1}\n' + message + "}\n")
    assert desk.run("bench", *arguments) == (2, f"{said}\n")


def test_a_bench_of_something_that_is_no_such_server(desk: Desk) -> None:
    with OpenAIServer(key="right", models=("m", "n")).running() as server:
        url = server.url
        assert desk.run("bench", url) == refused(f"{url} wants an API key: give --api-key-file")
        (desk.folder / "key").write_text("wrong")
        assert desk.run("bench", url, "--api-key-file", "key") == refused(
            f"{url} does not accept the key of --api-key-file"
        )
        (desk.folder / "key").write_text("right")
        assert desk.run("bench", url, "--api-key-file", "key", "--model", "o") == refused(
            f"{url} has no model o: it lists m, n"
        )
        assert desk.run("bench", f"{url}/docs", "--api-key-file", "key") == refused(
            f"{url}/docs/v1/models answers 404: give the URL of an OpenAI-compatible server"
        )
