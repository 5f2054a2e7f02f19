"""The operator of the reconcile tests."""

from __future__ import annotations

import pytest

from tests.support.operator_rig import (
    Kit,
)


@pytest.fixture
def kit() -> Kit:
    return Kit()
