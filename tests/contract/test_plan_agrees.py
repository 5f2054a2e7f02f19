"""One plan for the same facts: offline and in the operator, on a machine and in pods."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import msgspec
import pytest
import yaml

from foveal_operator.api.parse import InferenceSpec, parse
from foveal_operator.cli import main as operator_cli
from foveal_operator.cli.local import command as up
from foveal_operator.manifests import ClusterFacts, desired
from foveal_operator.manifests.budget_inputs import NodeFacts, budget_inputs
from foveal_runtime.main import cli, profile
from foveal_runtime.plan import machine
from foveal_runtime.plan.budget.planner import plan
from foveal_runtime.plan.config import GIB
from foveal_runtime.plan.machine_plan import plan_lines
from foveal_runtime.plan.profile import ModelProfile, ProfileLimits, decode
from tests.support import sizing
from tests.support.checkpoint_files import PROFILE, checkpoint, write_profile
from tests.support.samples import resource

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of transformers' processors

EXAMPLES = Path(__file__).parents[2] / "examples"
PAIRS = {
    "mmi-canary.yaml": "qwen2.5-vl-7b",
    "mmi-minimal.yaml": "qwen2.5-vl-7b",
    "mmi-gpu.yaml": "qwen2.5-vl-7b",
    "mmi-one-gpu.yaml": "qwen2.5-vl-7b",
    "mmi-cpu-laptop.yaml": "tiny-vlm",
    "mmi-cluster.yaml": "tiny-vlm",
}
NODES = NodeFacts(device_bytes=80 * GIB)


def inference(name: str) -> InferenceSpec:
    return parse(yaml.safe_load((EXAMPLES / name).read_text()))


def job_words(spec: InferenceSpec) -> list[str]:
    """The arguments of the profile Job that the operator makes for the resource."""
    job = desired(spec, None, ClusterFacts()).of_kind("Job")[-1]
    words: list[str] = job["spec"]["template"]["spec"]["containers"][0]["args"]
    assert words[0] == "profile"
    return words[2 : words.index("--output")]


@pytest.fixture(scope="module")
def profile_of_the_job(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., ModelProfile]:
    """profile_of_the_job(name, *flags): several examples have the same."""
    folder = tmp_path_factory.mktemp("models")
    return cache(lambda name, *flags: make_profile(name, list(flags), folder))


def make_profile(name: str, flags: list[str], folder: Path) -> ModelProfile:
    if name in sizing.MODELS:
        return sizing.make_profile(name, folder, flags)
    words = ["profile", str(EXAMPLES / "tiny-vlm/model"), *flags]
    arguments = cli.parser().parse_args(words)
    return profile.profile_model(
        arguments.model,
        profile.limits_of(arguments),
        dtype=arguments.dtype,
        device=arguments.device,
    )


def test_every_example_is_walked() -> None:
    assert set(PAIRS) == {file.name for file in EXAMPLES.glob("mmi-*.yaml")}


@pytest.mark.parametrize("example", PAIRS)
def test_the_job_is_given_the_limits_of_the_resource(example: str) -> None:
    spec = inference(example)
    arguments = cli.parser().parse_args(["profile", "model", *job_words(spec)])
    wanted = ProfileLimits.of(budget_inputs(spec, NODES).modalities)
    assert ProfileLimits.of(profile.limits_of(arguments)) == wanted


@pytest.mark.parametrize("example", PAIRS)
def test_offline_and_operator_plan_the_same(
    example: str, profile_of_the_job: Callable[..., ModelProfile]
) -> None:
    """mmi-gpu said "Fits, 2,287,408 tokens" offline and was refused by the operator with three
    problems: its committed profile was made with other limits, and nobody could see that."""
    spec = inference(example)
    committed = decode((EXAMPLES / "profiles" / f"{PAIRS[example]}.json").read_bytes())
    made = profile_of_the_job(PAIRS[example], *job_words(spec))
    # What processes take is measured, and differs from machine to machine.
    made = msgspec.structs.replace(made, processes=committed.processes)
    offline, found = (plan(budget_inputs(spec, NODES), one) for one in (committed, made))
    assert offline.fits
    assert offline == found


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_serve_up_and_pods_print_one_plan(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`up` gave each process the whole machine, and started more than it holds."""
    here = machine.Machine(
        memory_bytes=96 * GIB, available_bytes=96 * GIB, cpus=3.0,
        devices=(24 * GIB,) if device == "cuda" else (),
    )  # fmt: skip
    monkeypatch.setattr(machine, "look", lambda: here)
    monkeypatch.setattr("foveal_runtime.main.local.sizing._torch_version", lambda: "2.15.0")
    monkeypatch.setattr(up, "_launch", lambda *_: 0)
    kind = {"type": "CPU"} if device == "cpu" else {"type": "GPU", "count": 1}
    body = resource(engine={"accelerator": kind, "replicas": 1})
    file, model = tmp_path / "mmi.yaml", str(checkpoint(tmp_path / "model"))
    file.write_text(yaml.safe_dump(body))
    costs = ["--profile", write_profile(tmp_path)]

    def lines(run: Callable[[list[str]], int], *words: str) -> list[str]:
        assert run([*words, *costs]) == 0
        said = capsys.readouterr().out.splitlines()
        return [line for line in said if line.startswith("  ")]

    facts = NodeFacts(node_bytes=96 * GIB, device_bytes=24 * GIB)
    pods = list(plan_lines(plan(budget_inputs(parse(body), facts), PROFILE), 1, 1))
    assert len(pods) == (3 if device == "cpu" else 4)
    assert lines(cli.main, "serve", model, "--plan") == pods
    place = ("--model", model, "--folder", str(tmp_path / "up"))
    assert lines(operator_cli.main, "up", "-f", str(file), *place) == pods
    scaled = {"minReplicas": 1, "maxReplicas": 8}  # nobody scales here: the fewest start
    body = resource(
        engine={
            "accelerator": kind,
            "autoscaling": {**scaled, "prometheusAddress": "http://p:9090"},
        },
        frontend={"autoscaling": scaled},
    )
    file.write_text(yaml.safe_dump(body))
    assert lines(operator_cli.main, "up", "-f", str(file), *place) == pods
    here = msgspec.structs.replace(here, memory_bytes=30 * GIB, available_bytes=28 * GIB)
    served = lines(cli.main, "serve", model, "--plan")
    assert lines(operator_cli.main, "up", "-f", str(file), *place) == served
    if device == "cpu":  # weights and caches share what is there
        assert served != pods
