"""`python -m foveal_operator.cli` is the command foveal."""

from __future__ import annotations

import sys

from foveal_runtime.plan.program import run


def main() -> int:
    return run("foveal_operator.cli.main")


if __name__ == "__main__":  # walking the package must not start it
    sys.exit(main())
