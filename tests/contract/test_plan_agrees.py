"""`foveal plan` with a committed profile says what the operator finds with its Job's profile."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import msgspec
import pytest
import yaml

from foveal_operator.api.parse import InferenceSpec, parse
from foveal_operator.manifests import ClusterFacts, desired
from foveal_operator.manifests.budget_inputs import NodeFacts, budget_inputs
from foveal_runtime.main import cli, profile
from foveal_runtime.plan.budget.planner import plan
from foveal_runtime.plan.config import GIB
from foveal_runtime.plan.profile import ModelProfile, ProfileLimits, decode
from tests.support import sizing

pytestmark = [
    pytest.mark.model,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of transformers' own processors
]

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
