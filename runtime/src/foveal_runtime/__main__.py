"""`python -m foveal_runtime` is the command foveal-runtime."""

from __future__ import annotations

import sys

from foveal_runtime.plan.program import run


def main() -> int:
    return run("foveal_runtime.main.cli")


if __name__ == "__main__":  # walking the package must not start it
    sys.exit(main())
