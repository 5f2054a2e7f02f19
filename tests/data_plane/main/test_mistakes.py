"""Mistakes of a person who types `foveal serve` or `bench`, each with the line that answers it.

Nothing is loaded for any of these: a model is files that the tests write. The hub's mistakes are in
test_serve_hub.py, those with signals in test_serve_signals.py.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from foveal_runtime.main import cli
from foveal_runtime.plan.machine import Machine
from tests.support.checkpoint_files import CONFIG, GIB, checkpoint, safetensors, write_profile
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
        self.patch.setattr("foveal_runtime.plan.machine._devices", lambda: sizes)

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


PROG = "foveal-runtime serve"
SAY = "foveal-runtime"
OPTIONS = [
    ([], f"{SAY}: MODEL is missing: give a directory, or ORG/NAME of the Hugging Face hub"),
    (["model", "--kvcache", "4Gi"],
     f"foveal-runtime: unknown option --kvcache (did you mean --kv-cache?); see {SAY} --help"),
    (["model", "--kv-cache", "4"],
     f"{PROG}: argument --kv-cache: 4 means 4 bytes: write 4Gi or 4Mi; see {PROG} --help"),
    (["model", "--kv-cache", "lots"],
     f"{PROG}: argument --kv-cache: 'lots' is not a size: write 512Mi or 4Gi; see {PROG} --help"),
    (["model", "--port", "80000"],
     f"{PROG}: argument --port: 80000 is not a port: give 1 to 65535, or 0 for any; "
     f"see {PROG} --help"),
    (["model", "--engines", "0"],
     f"{PROG}: argument --engines: '0' is not a whole number of at least 1; see {PROG} --help"),
    (["model", "--memory", "90"],
     f"{PROG}: argument --memory: 90 is not a share: give 0.1 to 0.99, such as 0.9; "
     f"see {PROG} --help"),
    (["model", "--dtype", "int3"],
     f"{PROG}: argument --dtype: invalid choice: 'int3' (choose from 'auto', 'float32', "
     f"'bfloat16', 'float16'); see {PROG} --help"),
    (["model", "--api-key-file", "keys.txt"],
     f"{SAY}: --api-key-file keys.txt: there is no such file"),
    (["model", "--file-root", "media"], f"{SAY}: --file-root media: there is no such directory"),
    (["model", "--port", "65535", "--frontends", "2"],
     f"{SAY}: --port 65535: the last frontend's would be 65536"),
    (["model", "--events-port", "65535"],
     f"{SAY}: --events-port 65535: the last engine's would be 65536"),
    (["model", "--port", "8000", "--events-port", "7999"],
     f"{SAY}: --events-port 7999: engines take 7999 to 8000, frontends 8000 to 8000; choose ports "
     "that do not meet"),
    (["model", "--config", "no.yaml"],
     f"{SAY}: --config no.yaml: No such file or directory"),
    (["model", "--device", "cuda"],
     f"{SAY}: --device cuda: no NVIDIA driver answers here (nvidia-smi lists no device): install "
     "the driver, give the container its devices, or use --device cpu"),
    (["model", "--host", "no-such-host.invalid"], None),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "said"), OPTIONS, ids=lambda v: " ".join(v or ["-"])[:40])
def test_options(desk: Desk, arguments: list[str], said: str | None) -> None:
    code, err = desk.serve(*arguments)
    assert code == 2
    if said is None:
        said = err.strip()
        assert said.startswith(f"{SAY}: cannot listen on no-such-host.invalid, port 8000: ")
    assert err == f"{said}\n"


FILES: list[tuple[str, Callable[[Path], Any], str]] = [
    ("./modle", lambda _: None, "there is no directory ./modle (did you mean model?)"),
    ("/no/such/model", lambda _: None,
     "there is no directory /no/such/model: /no does not exist; a model of the Hugging Face hub is "
     "written ORG/NAME"),
    ("Qwen3-VL", lambda _: None,
     "there is no directory Qwen3-VL: a model of the Hugging Face hub is written ORG/NAME"),
    ("models", lambda d: checkpoint(d / "models/qwen") and shutil.rmtree(d / "model"),
     "model models holds no config.json (did you mean models/qwen?)"),
    ("model/model.safetensors", lambda _: None,
     "model/model.safetensors is a file: give its directory, model"),
    ("qwen.gguf", lambda d: (d / "qwen.gguf").write_bytes(b"GGUF"),
     "qwen.gguf is a GGUF file, which is not supported: give a directory with safetensors"),
    ("bad", lambda d: checkpoint(d / "bad", config_json="{"),
     "model bad: config.json cannot be read: Input data was truncated"),
    ("bad", lambda d: checkpoint(d / "bad", {"a": 1}),
     "model bad: config.json names no model_type: it is not a checkpoint of transformers"),
    ("bad", lambda d: checkpoint(d / "bad", preprocessor_config_json=None),
     "model bad takes media and holds no preprocessor_config.json: copy the processor's files from "
     "where the model is from"),
    ("bad", lambda d: checkpoint(d / "bad", tokenizer_json=None),
     "model bad holds no tokenizer.json: copy the tokenizer's files"),
    ("bad", lambda d: checkpoint(d / "bad", **{"model.safetensors": None, "model.bin": b""}),
     "model bad holds only model.bin: give one with *.safetensors"),
    ("bad", lambda d: checkpoint(d / "bad", **{"model.safetensors": None}),
     "model bad holds no weights: give one with *.safetensors"),
    ("bad", lambda d: checkpoint(d / "bad", **{
        "model.safetensors.index.json": json.dumps(
            {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}})}),
     "model bad is incomplete: 1 of 2 weight files are missing, model-2.safetensors among them: "
     "finish the download"),
    ("bad", lambda d: checkpoint(d / "bad", **{"model.safetensors": safetensors(4096, 100)}),
     "bad/model.safetensors has 176 of 4172 bytes: finish its download, or copy it again"),
    ("bad", lambda d: checkpoint(d / "bad", **{
        "model.safetensors": b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n"}),
     "bad/model.safetensors is a Git LFS pointer: run git lfs pull in its directory"),
    ("bad", lambda d: checkpoint(d / "bad", {**CONFIG, "quantization_config": {
        "quant_method": "bitsandbytes", "load_in_4bit": True}}), ""),
    ("https://huggingface.co/Qwen/Qwen3-VL-2B/tree/main", lambda _: None,
     "https://huggingface.co/Qwen/Qwen3-VL-2B/tree/main is a web page: write Qwen/Qwen3-VL-2B"),
    ("fh://org/model", lambda _: None, "fh://org/model: did you mean hf://org/model?"),
    ("oci://registry/model:1", lambda _: None,
     "oci://registry/model:1: only a cluster can mount oci:// models; give a directory, ORG/NAME "
     "or s3://BUCKET/PREFIX"),
    ("s3://", lambda _: None, "s3://: write hf://ORG/NAME or s3://BUCKET/PREFIX"),
]  # fmt: skip


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


def test_unknown_options_of_a_file_and_of_the_environment(desk: Desk) -> None:
    (desk.folder / "a.yaml").write_text("prot: 8000\n")
    assert desk.serve("model", "--config", "a.yaml") == refused(
        "--config a.yaml: unknown option prot (did you mean port?)"
    )
    (desk.folder / "b.yaml").write_text("no-prefix-caching: perhaps\n")
    assert desk.serve("model", "--config", "b.yaml") == refused(
        "--config b.yaml: no-prefix-caching is perhaps: write true or false"
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
    assert "weights" in err
    assert "spec." not in err


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
    with OpenAIServer(key="right", models=("m", "n")) as server:
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
