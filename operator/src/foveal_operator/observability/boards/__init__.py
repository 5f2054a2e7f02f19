"""The dashboards as data, one file each; tests/support/grafana.py draws them, and `foveal
dashboard` shows a choice of them. The operator does not use them at run time."""

from __future__ import annotations

from foveal_operator.observability.boards.caches import CACHES
from foveal_operator.observability.boards.encoder import ENCODER
from foveal_operator.observability.boards.memory import MEMORY
from foveal_operator.observability.boards.mirror import MIRROR
from foveal_operator.observability.boards.operator import OPERATOR_BOARD
from foveal_operator.observability.boards.overview import OVERVIEW
from foveal_operator.observability.boards.rollout import ROLLOUT

BOARDS = (OVERVIEW, CACHES, MEMORY, MIRROR, ENCODER, ROLLOUT, OPERATOR_BOARD)
