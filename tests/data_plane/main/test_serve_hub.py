"""`foveal serve ORG/NAME` against a hub on the loopback: download, resume, verification, refusals.

Each start is a process of its own, as the hub's library reads its environment when it is imported.
--plan ends it before anything is loaded.
"""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from foveal_runtime.main.local.model import check_description
from tests.support.checkpoint_files import CONFIG, checkpoint, safetensors, write_profile
from tests.support.model_hub import COMMIT, Hub

SAY = "foveal-runtime: "
BARE: dict[str, Any] = {"vision_config": None, "text_config": None}
_PLAIN = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    files = checkpoint(tmp_path / "files", **{"model.safetensors": safetensors(1 << 20)})
    with Hub("org/tiny", files).running() as running:
        yield running


class Starts:
    """Starts `foveal serve` for this hub with a home of its own."""

    def __init__(self, folder: Path, hub: Hub) -> None:
        self._folder, self._profile = folder, write_profile(folder)
        kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        self.environment = {**kept, **hub.environment(folder / "hf"), "HOME": str(folder)}

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "foveal_runtime.main.cli", "serve", *arguments, "--plan",
                "--device", "cpu", "--profile", self._profile]  # fmt: skip

    def begin(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**self.environment, **environment},
        )  # fmt: skip

    def __call__(self, *arguments: str, **environment: str) -> tuple[int, str, str]:
        """(exit code, standard output, standard error)."""
        process = self.begin(*arguments, **environment)
        out, err = process.communicate(timeout=100)
        return process.returncode, out, err


@pytest.fixture
def serve(tmp_path: Path, hub: Hub) -> Starts:
    return Starts(tmp_path, hub)


def bodies(hub: Hub) -> list[str]:
    """Requests for contents of files."""
    return [line for line in hub.asked if line.startswith("GET /org/tiny/resolve")]


def refused(said: str) -> tuple[int, str, str]:
    return 2, "", f"foveal-runtime: {said}\n"


def test_a_model_lands_in_the_usual_cache_and_is_not_downloaded_twice(
    serve: Starts, hub: Hub, tmp_path: Path
) -> None:
    code, out, err = serve("org/tiny@main")
    # The profile is of a model that no test machine holds: by then everything was downloaded.
    assert code in (0, 3), err
    snapshot = tmp_path / "hf/hub/models--org--tiny/snapshots" / COMMIT
    assert "downloading 1 file (1.0 MiB) of org/tiny into " + str(snapshot) in out
    assert (snapshot / "model.safetensors").stat().st_size == len(hub.files["model.safetensors"])
    num_bodies = len(bodies(hub))
    code, out, err = serve("hf://org/tiny")
    assert code in (0, 3), err
    assert "downloading" not in out
    assert len(bodies(hub)) == num_bodies
    asked = len(hub.asked)
    code, _, err = serve("org/tiny", HF_HUB_OFFLINE="1")
    assert code in (0, 3), err
    assert len(hub.asked) == asked


def on_a_terminal(serve: Starts, look: Callable[[bytes, int], None]) -> tuple[int, bytes]:
    """(exit code, output) of a start on a terminal. `look` gets all output so far, and the
    terminal, which it may type into."""
    pid, terminal = pty.fork()
    if pid == 0:
        environment = {**serve.environment, "TERM": "xterm", "COLUMNS": "100"}
        os.execve(sys.executable, serve.command("org/tiny"), environment)
    shown = b""
    with contextlib.suppress(OSError):  # the terminal's other end is closed
        while data := os.read(terminal, 65536):
            shown += data
            look(shown, terminal)
    os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), shown


def test_a_terminal_shows_a_bar_for_each_file_and_one_for_all(serve: Starts, hub: Hub) -> None:
    """And a log a line. The library's own bars are not shown beside them."""
    hub.files["more.safetensors"] = safetensors(3 << 20)
    hub.gate.clear()
    begun = {f"GET /org/tiny/resolve/{COMMIT}/{name}" for name in hub.files if "safet" in name}

    def look(shown: bytes, terminal: int) -> None:
        if b"more.safetensors" in shown and begun <= set(hub.asked):
            hub.gate.set()

    code, shown = on_a_terminal(serve, look)
    assert code in (0, 3), shown
    drawn = {line.split()[0] for line in _PLAIN.sub(b"", shown).splitlines() if b"MiB " in line}
    assert {b"model.safetensors", b"more.safetensors", b"all"} <= drawn, shown
    assert b"4.0/4.0 MiB" in shown
    assert b"Fetching" not in shown
    assert b"Reconstruct" not in shown


def test_ctrl_c_in_a_download_gives_the_cursor_back(serve: Starts, hub: Hub) -> None:
    hub.gate.clear()
    typed: list[int] = []

    def look(shown: bytes, terminal: int) -> None:
        if b"model.safetensors" in shown and not typed:
            typed.append(os.write(terminal, b"\x03"))

    code, shown = on_a_terminal(serve, look)
    assert code == 130, shown
    assert b"interrupted; the next start continues" in shown
    assert -1 < shown.rfind(b"\x1b[?25l") < shown.rfind(b"\x1b[?25h")


def test_ctrl_c_in_a_download_is_one_line_and_the_next_start_goes_on(
    serve: Starts, hub: Hub, tmp_path: Path
) -> None:
    """File by file: the hub's library gives up what it has of a file when its process ends."""
    hub.gate.clear()
    process = serve.begin("org/tiny")
    weights = f"GET /org/tiny/resolve/{COMMIT}/model.safetensors"
    deadline = time.monotonic() + 100
    while weights not in hub.asked:
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)  # while the hub still holds the rest back
    assert (process.returncode, err) == (130, f"{SAY}interrupted; the next start continues\n")
    assert not list((tmp_path / "hf").rglob("*.incomplete"))
    hub.gate.set()
    hub.asked.clear()
    code, _, err = serve("org/tiny")
    assert code in (0, 3), err
    assert bodies(hub) == [weights]


def test_a_connection_that_breaks_is_resumed_where_it_broke(serve: Starts, hub: Hub) -> None:
    hub.files["model.safetensors"] = safetensors(24 << 20)
    hub.cuts.add("model.safetensors")
    code, _, err = serve("org/tiny")
    assert code in (0, 3), err
    _, again = [line for line in bodies(hub) if "model.safetensors" in line]
    assert int(again.partition("bytes=")[2].partition("-")[0]) >= 10 << 20


def test_a_connection_that_does_not_come_back_is_no_traceback(serve: Starts, hub: Hub) -> None:
    """The library first says of each of its attempts that it broke off."""
    hub.gate.clear()
    code, _, err = serve("org/tiny", HF_HUB_DOWNLOAD_TIMEOUT="1")
    assert code == 2
    assert "Traceback" not in err
    assert err.splitlines()[-1] == (
        f"{SAY}org/tiny: the connection to the hub broke off (timed out): start again, which goes "
        "on with the files that are missing"
    )


def test_a_file_that_fails_ends_the_start_while_others_are_under_way(
    serve: Starts, hub: Hub, tmp_path: Path
) -> None:
    hub.files["more.safetensors"] = safetensors(3 << 20)
    hub.denied.add("more.safetensors")
    hub.gate.clear()  # the hub holds the first file back for a minute
    process = serve.begin("org/tiny", HF_HUB_DOWNLOAD_TIMEOUT="600")
    _, err = process.communicate(timeout=50)
    assert process.returncode == 2
    (line,) = err.splitlines()
    assert line.startswith(f"{SAY}org/tiny: ")
    assert "403" in line
    assert not list((tmp_path / "hf").rglob("*.incomplete"))


def test_a_damaged_download_is_removed_and_named(serve: Starts, hub: Hub) -> None:
    hub.damaged.add("model.safetensors")
    code, _, err = serve("org/tiny")
    assert (code, err) == (
        2,
        f"{SAY}org/tiny: model.safetensors was damaged on its way and is removed: start again, "
        "which downloads it again\n",
    )
    hub.damaged.clear()
    code, out, _ = serve("org/tiny")
    assert code in (0, 3)
    assert "downloading 1 file (" in out


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
         "weights are quantised (bitsandbytes), which is not supported"),
        ({"model_type": "mllama"}, "model_type 'mllama' is multimodal and not supported"),
        (BARE | {"model_type": "t5", "is_encoder_decoder": True},
         "model_type 't5' is not supported: an encoder-decoder with cross-attention; give a model"),
        (BARE | {"model_type": "modernbert"},
         "model_type 'modernbert' is not a generative language model of transformers, nor one of "
         "the encoders that are served: bert, camembert, "),
        (BARE | {"model_type": "bert"}, "bert is an encoder: it embeds texts and generates none; "
         "serve it with --task embed"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_refused_before_its_weights(
    serve: Starts, hub: Hub, change: dict[str, Any], said: str
) -> None:
    hub.files["config.json"] = json.dumps({**CONFIG, **change}).encode()
    code, _, err = serve("org/tiny")
    assert code == 2
    assert err.startswith(f"{SAY}model org/tiny: {said}")
    assert not any("safetensors" in line for line in hub.asked)


QUANTISED: dict[str, dict[str, Any]] = {
    "fp8": {"weight_block_size": [128, 128], "activation_scheme": "dynamic"},
    "awq": {"bits": 4, "group_size": 32, "version": "gemm", "zero_point": True},
    "gptq": {"bits": 4, "group_size": 32, "desc_act": False, "sym": True},
    "compressed-tensors": {
        "format": "pack-quantized",
        "config_groups": {"group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group",
                        "group_size": 32},
        }},
    },
}  # fmt: skip


def test_quantised_weights_that_are_supported_are_downloaded(
    serve: Starts, hub: Hub, tmp_path: Path
) -> None:
    """They were refused, because their files were not there yet."""
    for method, scheme in QUANTISED.items():
        config = {**CONFIG, "quantization_config": {"quant_method": method, **scheme}}
        folder = checkpoint(tmp_path / method, config, **{"model.safetensors": None})
        check_description(folder, "org/tiny")
    hub.files["config.json"] = json.dumps(config).encode()
    code, out, err = serve("org/tiny")
    assert code in (0, 3), err
    assert "downloading 1 file (" in out


def test_refusals_of_the_hub(serve: Starts, hub: Hub) -> None:
    hub.refusal = 403, "GatedRepo"
    assert serve("org/tiny") == refused(
        "org/tiny is gated: accept its licence on its page, and set HF_TOKEN"
    )
    hub.refusal = 401, "RepoNotFound"
    assert serve("org/tiny", HF_TOKEN="wrong") == refused(
        "org/tiny: the hub does not accept the token in HF_TOKEN: make a new one"
    )
    hub.refusal, hub.token = None, "right"
    assert serve("org/tiny", HF_TOKEN="right")[0] in (0, 3)
    hub.token = ""
    assert serve("org/other") == refused(
        "the hub has no model org/other, and there is no such directory here: check the name; if "
        "it is private, set HF_TOKEN"
    )
    assert serve("org/tiny", "--revision", "v9") == refused(
        "org/tiny has no revision v9: give a branch, tag or commit of it"
    )


def test_without_a_network(serve: Starts, hub: Hub) -> None:
    assert serve("org/tiny", HF_ENDPOINT="http://127.0.0.1:9") == refused(
        "org/tiny is not in the cache, and the hub at http://127.0.0.1:9 cannot be reached: check "
        "the network, HF_ENDPOINT and proxies, or give a directory"
    )
    assert serve("org/tiny", HF_HUB_OFFLINE="1") == refused(
        "org/tiny is not in the cache below HF_HOME, and HF_HUB_OFFLINE forbids to download it: "
        "unset it, or give a directory"
    )
    assert hub.asked == []
    assert serve("org/tiny")[0] in (0, 3)
    assert serve("org/tiny", HF_ENDPOINT="http://127.0.0.1:9")[0] in (0, 3), "the cache has it"
