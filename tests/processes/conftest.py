"""Real frontend and engine processes on the bundled model, and a client that knows the answers.

The model tells the truth, so a wrong cache shows as a wrong answer: every test here asks held-out
questions whose answers the generator knows.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest

from foveal_runtime.main.launcher import LocalDeployment
from foveal_runtime.main.local.serve import local_documents
from foveal_runtime.plan.local import free_port

ROOT = Path(__file__).resolve().parents[2]
TINY = Path(os.environ.get("FOVEAL_TINY", ROOT / "examples" / "tiny-vlm"))
WEIGHTS = Path(os.environ.get("FOVEAL_TEST_MODEL", TINY / "model"))
sys.path.insert(0, str(TINY))

import evaluate  # noqa: E402
from evaluate import draw_samples, to_request  # noqa: E402
from questions import FAMILIES, Sample, is_right  # noqa: E402
from structured import STRUCTURED_FAMILIES  # noqa: E402

# Another model may never say that it is done; its replies may be cut short.
LONGEST_REPLY = int(os.environ.get("FOVEAL_TEST_TOKENS", evaluate.LONGEST_REPLY))
# A process needs some 10 s of a core until it is ready; on a machine that does much else, minutes.
START_SECONDS = float(os.environ.get("FOVEAL_START_SECONDS", "400"))
MIB = 1024**2
MODEL = "tiny-vlm"


class Asker:
    """Asks samples over HTTP and checks the answers."""

    def __init__(self, url: str) -> None:
        self.url = url
        # A new picture may have to wait for a media worker that has just been killed.
        self.http = httpx.Client(base_url=url, timeout=START_SECONDS)

    def close(self) -> None:
        self.http.close()

    def post(self, sample: Sample, **options: Any) -> httpx.Response:
        body = {**to_request(sample, MODEL), "max_tokens": LONGEST_REPLY, **options}
        return self.http.post("/v1/chat/completions", json=body)

    def ask(self, sample: Sample, **options: Any) -> str:
        answer = self.post(sample, **options)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["message"]["content"])

    def check(self, sample: Sample, **options: Any) -> None:
        """The reply is what plain transformers says, token for token."""
        assert self.ask(sample, **options) == sample.reference, sample.family

    def check_beginning(self, sample: Sample) -> None:
        """The same for the reply's first tokens, where many requests matter more than long ones."""
        text = self.ask(sample, max_tokens=8)
        assert text, sample.family
        assert sample.reference.startswith(text), (sample.family, text, sample.reference)

    def page(self) -> str:
        """Its /metrics, for several figures of one moment."""
        return self.http.get("/metrics").raise_for_status().text

    def metric(self, name: str, page: str = "", **labels: str) -> float:
        """Sum of the series of a name that carry the given labels, on `page` or a new one."""
        from prometheus_client.parser import text_string_to_metric_families

        lines = [one for one in (page or self.page()).splitlines() if one.startswith(name)]
        return sum(
            sample.value
            for family in text_string_to_metric_families("\n".join(lines))
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )


@pytest.fixture(scope="session")
def samples(request: pytest.FixtureRequest) -> list[Sample]:
    """Held-out questions of every family, with the greedy reply of plain transformers in fp32."""
    return with_references(request, draw_samples(list(FAMILIES), 5, "processes", False))


@pytest.fixture(scope="session")
def structured_samples(request: pytest.FixtureRequest) -> list[Sample]:
    """The same for what is answered in JSON or by calling a tool."""
    return with_references(request, draw_samples(list(STRUCTURED_FAMILIES), 8, "processes", False))


def with_references(request: pytest.FixtureRequest, drawn: list[Sample]) -> list[Sample]:
    """The replies are kept between runs under a key of all that they depend on: running the model
    takes longer than most tests, above all where a test is run alone.
    """
    cache = request.config.cache
    assert cache is not None
    name = f"foveal/references-{digest_of_references(drawn)}"
    replies = cache.get(name, None)
    if replies is None:
        replies = plain_replies(drawn)
        cache.set(name, replies)
    for sample, reply in zip(drawn, replies, strict=True):
        sample.reference = reply
    right = sum(is_right(sample.reference, sample.verdict) for sample in drawn)
    if "FOVEAL_TEST_MODEL" not in os.environ:
        # Its accuracy by family is evaluate.py's business. Here it only has to look at pictures, or
        # equality with the reference would prove little.
        assert right >= 0.9 * len(drawn), "the bundled model does not look at its pictures"
    return drawn


def digest_of_references(samples: list[Sample]) -> str:
    """Of the questions, the model's files and the software that answers."""
    found = hashlib.blake2b(digest_size=16)
    for sample in samples:
        found.update(json.dumps(to_request(sample, MODEL), sort_keys=True).encode())
    for path in sorted(WEIGHTS.iterdir()):
        found.update(path.name.encode() + path.read_bytes())
    found.update(f"{version('torch')} {version('transformers')} {LONGEST_REPLY}".encode())
    return found.hexdigest()


def plain_replies(samples: list[Sample]) -> list[str]:
    import torch
    from transformers import AutoModelForImageTextToText, AutoProcessor

    model = AutoModelForImageTextToText.from_pretrained(WEIGHTS, dtype=torch.float32).eval()
    processor = AutoProcessor.from_pretrained(WEIGHTS)
    replies = []
    for sample in samples:
        text = processor.apply_chat_template(
            sample.messages,
            tools=sample.options.get("tools"),
            add_generation_prompt=True,
            tokenize=False,
        )
        images = [picture.image for picture in sample.pictures]
        inputs = processor(text=[text], images=images or None, return_tensors="pt")
        with torch.inference_mode():
            output = model.generate(**inputs, max_new_tokens=LONGEST_REPLY, do_sample=False)
        fresh = output[0, inputs["input_ids"].shape[1] :]
        replies.append(processor.tokenizer.decode(fresh, skip_special_tokens=True))
    return replies


@pytest.fixture(scope="session")
def longest_reply() -> int:
    """Tokens after which every reply of `samples` has ended."""
    return LONGEST_REPLY


@pytest.fixture(scope="session")
def mixed(samples: list[Sample]) -> list[Sample]:
    """Forty samples, each asked about twice, in an order that mixes them."""
    some = samples[:40]
    order = some + some
    random.Random(5).shuffle(order)
    return order


Start = Callable[..., tuple[LocalDeployment, list[Asker]]]
Change = Callable[[list[Any], list[Any]], tuple[list[Any], list[Any]]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts deployments that are torn down after the test."""
    running: list[LocalDeployment] = []
    askers: list[Asker] = []

    def run(**options: Any) -> tuple[LocalDeployment, list[Asker]]:
        deployment = make_deployment(**options)
        running.append(deployment)
        deployment.start()
        deployment.wait_ready(START_SECONDS)
        own = [Asker(child.url) for child in deployment.frontends]
        askers.extend(own)
        return deployment, own

    yield run
    for asker in askers:
        asker.close()
    for deployment in running:
        deployment.stop(10)


def make_deployment(change: Change | None = None, **options: Any) -> LocalDeployment:
    """A small deployment; `options` are those of local_documents, `change` edits the documents."""
    defaults: dict[str, Any] = {
        "model": str(WEIGHTS),
        "name": MODEL,
        "port": 0,
        "kv_bytes": 32 * MIB,
        "ipc_bytes": 32 * MIB,
        "processor_bytes": 32 * MIB,
        "media_workers": 1,
        "num_threads": 1,
        "idle_check_seconds": 1.0,
    }
    engines, frontends = local_documents(free_port, **{**defaults, **options})
    if change:
        engines, frontends = change(engines, frontends)
    return LocalDeployment(engines, frontends)


@pytest.fixture(scope="session")
def deploy() -> Callable[..., LocalDeployment]:
    """Makes a deployment without starting it."""
    return make_deployment


@pytest.fixture(scope="session")
def deploy_through_relays() -> Callable[..., Any]:
    """A context manager: (deployment, askers, relays), a relay of its own in every link."""
    from tests.support.processes.relay import Relay, through_relays

    @contextlib.contextmanager
    def run(
        change: Change = lambda *documents: documents, **options: Any
    ) -> Iterator[tuple[LocalDeployment, list[Asker], list[Relay]]]:
        relays: list[Relay] = []
        relayed = through_relays(relays)
        with contextlib.ExitStack() as stack:
            deployment = make_deployment(lambda *both: relayed(*change(*both)), **options)
            for relay in relays:
                stack.enter_context(contextlib.closing(relay))
            stack.enter_context(deployment)
            deployment.wait_ready(START_SECONDS)
            askers = [
                stack.enter_context(contextlib.closing(Asker(child.url)))
                for child in deployment.frontends
            ]
            yield deployment, askers, relays

    return run


@pytest.fixture(scope="session")
def deployment_of() -> Callable[..., LocalDeployment]:
    """`deploy` for fixtures that live longer than a test."""
    return make_deployment


@pytest.fixture(scope="session")
def start_seconds() -> float:
    """What a process may take until it is ready."""
    return START_SECONDS


@pytest.fixture(scope="session")
def model_folder() -> Path:
    return WEIGHTS


@pytest.fixture(scope="session")
def asker_for() -> Iterator[Callable[[str], Asker]]:
    """Makes askers that are closed at the end."""
    with contextlib.ExitStack() as stack:
        yield lambda url: stack.enter_context(contextlib.closing(Asker(url)))


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Options with which frontends take the keys "admin-key" and "inject-key"."""
    folder = tmp_path_factory.mktemp("keys")
    for name in ("admin", "inject"):
        (folder / name).write_text(f"{name}-key\n")
    return {
        "admin_key_file": str(folder / "admin"),
        "injection_key_file": str(folder / "inject"),
    }


@pytest.fixture(scope="session")
def shared_links(deploy_through_relays: Any, keys: dict[str, str]) -> Iterator[Any]:
    """(deployment, askers, relays) of two frontends and an engine, for all tests that leave it as
    they found it: starting one takes longer than most tests."""

    def tenants(engines: list[Any], frontends: list[Any]) -> tuple[list[Any], list[Any]]:
        named = [msgspec.structs.replace(f, tenant_salt_header="X-Tenant") for f in frontends]
        return engines, named

    with deploy_through_relays(change=tenants, num_frontends=2, **keys) as found:
        yield found


@pytest.fixture(scope="session")
def shared(shared_links: Any) -> tuple[LocalDeployment, Asker]:
    """The deployment of `shared_links` and its first frontend, whose /metrics shows all."""
    deployment, askers, _ = shared_links
    return deployment, askers[0]


@pytest.fixture
def client(shared: Any) -> Iterator[openai.OpenAI]:
    """The openai package's client of the shared deployment, unmodified."""
    url = shared[1].url + "/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=300) as client:
        yield client
