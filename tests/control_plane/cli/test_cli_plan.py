"""`foveal plan`: exit codes, plain output, the same YAML as the operator's objects."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from foveal_operator.cli import main as cli
from foveal_operator.cli.plan.render import yaml_documents
from foveal_operator.cli.terminal import Style
from foveal_operator.manifests import ClusterFacts
from foveal_operator.observability import resource_dashboards, resource_rule_groups
from tests.support.budget_samples import VLM
from tests.support.regenerate import ALL_APIS, wanted
from tests.support.samples import resource

EXAMPLES = Path(__file__).parents[3] / "examples"
QWEN, TINY = EXAMPLES / "profiles/qwen2.5-vl-7b.json", EXAMPLES / "profiles/tiny-vlm.json"
GPU = ["--device-memory", "80Gi"]


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    resource_file, profile = tmp_path / "mmi.yaml", tmp_path / "profile.json"
    resource_file.write_text(yaml.safe_dump(resource()))
    profile.write_bytes(msgspec.json.encode(VLM))
    return resource_file, profile


def plan(files: tuple[Path, Path], *more: str) -> int:
    return cli.main(["plan", "-f", str(files[0]), "--profile", str(files[1]), *more])


def test_a_plan_that_fits_ends_with_0(files: Any, capsys: Any) -> None:
    assert plan(files, *GPU) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "Fits." in out
    assert re.search(r"StatefulSet +qwen-engine", out)
    assert "\x1b" not in out
    assert "█" not in out


def test_a_misfit_ends_with_3_and_says_what_to_do(files: Any, capsys: Any) -> None:
    assert plan(files, "--device-memory", "16Gi") == 3
    out = capsys.readouterr().out
    assert "DeviceMemory: The device has 16.00 GiB, of which 14.40 GiB is usable" in out
    assert "set spec.engine.accelerator.count to 2" in out
    assert "StatefulSet" not in out
    assert plan(files, "--device-memory", "16Gi", "-o", "yaml") == 3
    assert "DeviceMemory" in capsys.readouterr().err


def test_yaml_is_what_the_operator_applies(files: Any, capsys: Any) -> None:
    assert plan(files, *GPU, "-o", "yaml", "--image", "example/runtime:1") == 0
    out = capsys.readouterr().out
    facts = ClusterFacts(
        apis=ALL_APIS,
        runtime_image="example/runtime:1",
        rule_groups=resource_rule_groups(),
        dashboards=resource_dashboards(),
    )
    objects = wanted(resource(), facts)
    assert {"PrometheusRule", "PodMonitor"} <= {owned.key[0] for owned in objects.objects}
    applied = [o.body for o in objects.objects if o.policy != "CreateOnly"]
    assert out.split("---\n", 1)[1] == yaml_documents(applied).split("---\n", 1)[1]
    assert list(yaml.safe_load_all(out)) == applied
    assert out.startswith("# Secret qwen-curve: created once")


def test_the_namespace_of_the_flag_is_that_of_the_objects(files: Any, capsys: Any) -> None:
    body = resource()
    del body["metadata"]["namespace"]
    files[0].write_text(yaml.safe_dump(body))
    assert plan(files, *GPU, "-o", "yaml", "-n", "vision") == 0
    found = list(yaml.safe_load_all(capsys.readouterr().out))
    assert {one["metadata"]["namespace"] for one in found} == {"vision"}
    files[0].write_text(yaml.safe_dump(resource()))
    assert plan(files, *GPU, "-n", "models") == 0
    capsys.readouterr()
    for more in ([], ["--server"]):
        assert plan(files, *GPU, "-n", "vision", *more) == 2
        assert f"--namespace vision: {files[0]} names namespace models" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--context", "--kubeconfig"])
def test_a_cluster_is_named_only_where_it_is_read(files: Any, capsys: Any, flag: str) -> None:
    assert plan(files, *GPU, flag, "here") == 2
    assert f"{flag} names a cluster, which only --server reads" in capsys.readouterr().err


def test_json_is_for_programs(files: Any, capsys: Any) -> None:
    assert plan(files, *GPU, "-o", "json") == 0
    body = json.loads(capsys.readouterr().out)
    assert body["fits"] is True
    assert {"frontend", "engine", "device"} == body["budgets"].keys()
    assert {"policy", "object"} == body["objects"][0].keys()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is not YAML"),
        ("kind: Pod\n---\nkind: Pod\n", "holds 0 MultiModalInference objects"),
        ("kind: Pod\n", "apiVersion: is None"),
        (yaml.safe_dump(resource(engine={"gpus": 1})), "spec.engine.gpus: unknown field"),
        (
            yaml.safe_dump(resource(engine={"podTemplate": {"spec": {"hostNetwork": True}}})),
            "spec.engine.podTemplate.spec.hostNetwork",
        ),
        ("a: !!python/object/apply:os.system [true]", "is not YAML"),
        ("spec: {engine: {}, engine: {}}", "the key 'engine' stands twice in one map"),
        ("a: 2024-99-99", "is not YAML: month must be in 1..12"),
        ("a: " + "1" * 5000, "is not YAML: Exceeds the limit"),
        ("[" * 5000, "is not YAML: maximum recursion depth exceeded"),
        (
            "&a {apiVersion: foveal.dev/v1alpha1, kind: MultiModalInference, metadata: {name: a}, "
            "spec: {frontend: {podTemplate: *a}}}",
            "",
        ),
    ],
)
def test_a_wrong_resource_ends_with_2(files: Any, capsys: Any, text: str, said: str) -> None:
    files[0].write_text(text)
    assert plan(files, *GPU) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err


@pytest.mark.parametrize("text", ["{}", '{"a": ' + "[" * 5000])
def test_a_wrong_profile_ends_with_2(files: Any, capsys: Any, text: str) -> None:
    files[1].write_text(text)
    assert plan(files) == 2
    assert "foveal-runtime profile" in capsys.readouterr().err
    files[1].unlink()
    assert plan(files) == 2
    assert "cannot read the profile" in capsys.readouterr().err


def test_wrong_arguments_end_with_2(files: Any, capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        plan(files, "--device-memory", "80 GB")
    assert ended.value.code == 2
    assert "not a quantity" in capsys.readouterr().err


def test_a_forgotten_unit_is_asked_back(files: Any, capsys: Any) -> None:
    """80 was 80 bytes, and the answer that no device has so little told nobody why."""
    with pytest.raises(SystemExit) as ended:
        plan(files, "--device-memory", "80")
    assert ended.value.code == 2
    assert "80 is 80 bytes; did you mean 80Gi?" in capsys.readouterr().err


def test_a_profile_with_smaller_limits_than_the_resource_ends_with_3(
    files: Any, capsys: Any
) -> None:
    files[0].write_text(yaml.safe_dump(resource(modalities={"video": {"maxFrames": 64}})))
    assert plan((files[0], QWEN), *GPU) == 3
    assert "Make the profile again with --max-frames 64" in " ".join(
        capsys.readouterr().out.split()
    )


def test_the_resource_may_come_through_a_pipe(files: Any, capsys: Any, monkeypatch: Any) -> None:
    stdin = io.TextIOWrapper(io.BytesIO(files[0].read_bytes()))
    monkeypatch.setattr(sys, "stdin", stdin)
    assert cli.main(["plan", "-f", "-", "--profile", str(files[1]), *GPU]) == 0
    assert "qwen in models" in capsys.readouterr().out


@pytest.mark.parametrize("command", [["--help"], ["plan", "--help"]])
def test_help_tells_exit_codes(command: list[str], capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(command)
    assert ended.value.code == 0
    assert "exit codes" in capsys.readouterr().out


def test_an_unknown_device_is_not_one_of_no_memory(capsys: Any) -> None:
    """It said: limit 0.00 GiB, Pinned."""
    assert plan((EXAMPLES / "mmi-minimal.yaml", QWEN)) == 3
    out = capsys.readouterr().out
    assert "\nDevice of an engine  limit unknown\n" in out
    assert "0.00 GiB, Pinned" not in out


@pytest.mark.parametrize(
    ("name", "profile", "more"),
    [
        ("mmi-minimal.yaml", QWEN, GPU),
        ("mmi-gpu.yaml", QWEN, []),
        ("mmi-cpu-laptop.yaml", TINY, ["--node-memory", "8Gi"]),
    ],
)
def test_the_examples_fit(name: str, profile: Path, more: list[str], capsys: Any) -> None:
    assert plan((EXAMPLES / name, profile), *more) == 0
    assert "Fits." in capsys.readouterr().out


def test_a_terminal_gets_bars_and_clipped_rows() -> None:
    style = Style(is_terminal=True, width=20)
    assert style.clip("x" * 30) == "x" * 19 + "…"
    assert style.bold("a") == "\x1b[1ma\x1b[0m"


def test_the_operator_never_loads_torch() -> None:
    """The operator's image has no torch; neither may the import path of any of its modules."""
    code = (
        "import pkgutil, importlib, sys, foveal_operator\n"
        "for m in pkgutil.walk_packages(foveal_operator.__path__, 'foveal_operator.'):\n"
        "    importlib.import_module(m.name)\n"
        "bad = {'torch', 'transformers', 'numpy', 'zmq', 'fastapi'} & set(sys.modules)\n"
        "rooms = [m for m in sys.modules if m.startswith('foveal_runtime.')\n"
        "         and not m.startswith('foveal_runtime.plan')]\n"
        "sys.exit(f'{bad} {rooms}' if bad or rooms else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
