"""The runtime's command with an engine that crashes in the step that first computes a marker.

Given to LocalDeployment as its command; the product knows nothing of it.
"""

import ctypes
import sys

from foveal_runtime.main import cli, engine

MARKER = [11, 12, 11, 13, 11, 12]


def _crash_on_marker() -> None:
    load = engine.load_engine

    def load_poisonable(*args):  # type: ignore[no-untyped-def]
        loaded = load(*args)
        submit = loaded.runner.submit

        def poisoned(plan, between=None):  # type: ignore[no-untyped-def]
            if any(new.token_ids[: len(MARKER)] == MARKER for new in plan.new):
                ctypes.string_at(0)
            return submit(plan, between)

        loaded.runner.submit = poisoned
        return loaded

    engine.load_engine = load_poisonable


if __name__ == "__main__":
    _crash_on_marker()
    sys.exit(cli.main())
