"""Argo CD's verdict on a resource: its health script in a Lua interpreter."""

from __future__ import annotations

from typing import Any

import lupa

from tests.support.regenerate import ARGO


def argo_health(obj: dict[str, Any]) -> tuple[str, str]:
    """Runs health.lua as Argo CD does: the object in the global `obj`, a table returned."""
    runtime = lupa.LuaRuntime(unpack_returned_tuples=True, register_eval=False)
    runtime.globals()["obj"] = runtime.table_from(obj, recursive=True)
    found = runtime.execute((ARGO / "health.lua").read_text())
    return found["status"], found["message"]
