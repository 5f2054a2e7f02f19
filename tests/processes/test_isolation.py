"""Two tenants over HTTP: what one has brought is unknown to the other, in every cache."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.timeout(900)

HEADER = "X-Tenant"  # of the deployment `shared`
CACHES = {
    "mm": ("vllm:mm_cache_hits_total", {}),
    "processor": ("foveal_cache_hits_total", {"cache": "processor"}),
    "ipc": ("foveal_cache_hits_total", {"cache": "ipc"}),
    "encoder": ("foveal_cache_hits_total", {"cache": "encoder"}),
    "kv": ("foveal_cache_hits_total", {"cache": "kv"}),
    "prefix": ("vllm:prefix_cache_hits_total", {}),
    "url text": ("foveal_media_url_text_hits_total", {}),
}


def hits(asker) -> dict[str, float]:
    page = asker.page()
    return {name: asker.metric(metric, page, **labels) for name, (metric, labels) in CACHES.items()}


def num_encoded(asker) -> float:
    return asker.metric("foveal_encoder_items_total")


class Tenant:
    """Who asks: by header, by the request's own salt, both or neither."""

    def __init__(self, asker, header: str = "", salt: str = "") -> None:
        self.asker = asker
        self.headers = {HEADER: header} if header else {}
        self.options: dict[str, Any] = {"cache_salt": salt} if salt else {}

    def post(self, *args: Any, **options: Any):
        from tests.support.processes.pictures import question

        body = {**question(*args, **options), **self.options}
        return self.asker.http.post("/v1/chat/completions", json=body, headers=self.headers)

    def ask(self, *args: Any, **options: Any) -> str:
        from tests.support.processes.pictures import answer_of

        return answer_of(self.post(*args, **options))


@pytest.fixture
def asker(shared):
    """The frontend that other tests use, too: nobody else asks meanwhile, or about these seeds."""
    return shared[1]


@pytest.mark.parametrize("kind", ["header", "salt"])
def test_a_tenant_never_hits_what_another_brought(asker, kind):
    seed = 10 if kind == "header" else 20
    one, other, nobody = Tenant(asker, **{kind: "a"}), Tenant(asker, **{kind: "b"}), Tenant(asker)
    start, encoded = hits(asker), num_encoded(asker)
    said = one.ask(seed, "cat")
    assert hits(asker) == start, "the first request found something"

    for stranger in (other, nobody, Tenant(asker, header="b", salt="a")):
        unknown = stranger.post(seed, "cat", with_url=False)
        assert unknown.status_code == 400, unknown.text
        assert unknown.json()["error"]["code"] == "media_unknown"
    for stranger in (other, nobody):
        assert stranger.ask(seed) == said
    assert hits(asker) == start, "a stranger found what another had brought"
    assert num_encoded(asker) == encoded + 3
    other.ask(seed + 1, "cat")  # no conflict: a's uuid is not b's

    before = hits(asker)
    assert one.ask(seed, "cat") == said
    assert one.ask(seed, "cat", with_url=False) == said
    after = hits(asker)
    for name in ("mm", "processor", "ipc", "kv", "prefix", "url text"):
        assert after[name] > before[name], name
    assert one.post(seed + 1, "cat").status_code == 409


def test_the_header_and_the_salt_of_a_request_both_separate(asker):
    start, encoded = hits(asker), num_encoded(asker)
    tenants = [Tenant(asker, "c"), Tenant(asker, "c", "x"), Tenant(asker, "d", "x"),
               Tenant(asker, "", "x")]  # fmt: skip
    answers = {tenant.ask(30) for tenant in tenants}
    assert len(answers) == 1
    assert hits(asker) == start
    assert num_encoded(asker) == encoded + len(tenants)
