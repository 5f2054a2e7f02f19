"""The dashboard's page over made-up series."""

from __future__ import annotations

from functools import lru_cache

from foveal_operator.cli.dashboard import layout
from foveal_operator.cli.dashboard.page import About, page
from foveal_operator.cli.dashboard.promql.evaluate import ask
from foveal_operator.cli.dashboard.promql.samples import Store
from tests.support import metric_samples


@lru_cache
def world_store() -> Store:
    store = Store()
    for when, samples in metric_samples.scrapes(10):
        store.add(when, samples)
    return store


@lru_cache
def world_page() -> str:
    store = world_store()
    times = list(store.times)[1:]
    chosen = layout.Chosen()
    about = About(subject="<qwen>", source="a & b", window_seconds=60, notes=("look <here>",))
    return page(about, times, lambda expr: ask(store, chosen.fill(expr), times))
