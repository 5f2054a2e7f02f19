"""How pods come from one revision to the next: one pure decision a pass, level-triggered. No I/O.

Called by the reconciler with what it has just read; see docs/decisions/rollout.md.
"""

from __future__ import annotations

from foveal_operator.rollout_view import RolloutDecision, RolloutView, record_name

__all__ = ["RolloutDecision", "RolloutView", "decide", "record_name"]


def decide(view: RolloutView) -> RolloutDecision:
    """The next step of a rollout; the same view gives the same decision."""
    raise NotImplementedError(view.now)
