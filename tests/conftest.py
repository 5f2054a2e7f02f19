"""For all topics: without a GPU, Triton kernels run in Triton's interpreter.

Triton decides that when it is first imported, which anything that imports transformers may do: so
it is said here, before any test module. FOVEAL_DEVICE=cuda runs the model tests on a GPU instead.
"""

from __future__ import annotations

import os

if os.environ.get("FOVEAL_DEVICE", "cpu") == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")
