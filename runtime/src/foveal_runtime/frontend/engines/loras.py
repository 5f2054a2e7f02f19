"""Which engines serve what a request asks for, LoRA adapters above all, and orders to load them.

Used by `client`. Engines tell what they hold when a session begins and whenever it changes.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable, Sequence

from foveal_runtime.frontend.engines.link import EngineLink
from foveal_runtime.frontend.items.prepared import PreparedRequest
from foveal_runtime.plan.errors import InvalidRequest, NoEngine
from foveal_runtime.plan.lora import NOT_LOADED, LoraRef

ORDER_SECONDS = 60.0
_LOOK_SECONDS = 0.02


def serves(link: EngineLink, request: PreparedRequest) -> bool:
    """Whether the engine takes requests now and can do what this one asks."""
    if not link.is_ready or link.info is None or not link.info.serves(request.sampling):
        return False
    return request.lora is None or request.lora in link.loras.refs


def why_none(links: Iterable[EngineLink], request: PreparedRequest) -> str:
    """Why engines are ready and none of them serves the request; "" where there is no such."""
    ready = [link for link in links if link.is_ready and link.info is not None]
    if not ready or any(serves(link, request) for link in ready):
        return ""
    if request.lora is not None and request.lora not in served_loras(ready).values():
        return f" that has the LoRA adapter {request.lora.name!r}"
    return " but those of another version, which do not know what the request asks for"


def served_loras(links: Iterable[EngineLink]) -> dict[str, LoraRef]:
    """By name. Where engines have another adapter under the same name, the first's counts. While
    none is ready, what they had: requests wait for an engine as those for the model itself."""
    links = list(links)
    found: dict[str, LoraRef] = {}
    for link in [link for link in links if link.is_ready] or links:
        for ref in link.loras.refs:
            found.setdefault(ref.name, ref)
    return found


async def order_lora(links: Sequence[EngineLink], action: str, lora: tuple[str, str]) -> int:
    """Has every ready engine load or unload an adapter (name, directory); how many did. Engines
    that never had what is to be unloaded do not count.

    Raises InvalidRequest with the engines' reasons, NoEngine where none is ready or answers.
    """
    number = secrets.randbits(53)
    ready = [link for link in links if link.is_ready]
    old = {link.endpoint for link in ready if link.info is None or link.info.loras is None}
    told = [one for one in ready if one.endpoint in old or one.control(action, number, lora)]
    if not told:
        raise NoEngine("no engine is ready", retry_after_seconds=2)
    why_old = "engines of an older version serve no adapters"
    reasons = dict.fromkeys(old, why_old if action == "load_lora" else NOT_LOADED)
    try:
        async with asyncio.timeout(ORDER_SECONDS):
            while len(reasons) < len(told):
                await asyncio.sleep(_LOOK_SECONDS)
                for link in told:
                    outcomes = dict(link.loras.outcomes)
                    if number in outcomes:
                        reasons[link.endpoint] = outcomes[number]
                    elif not link.sender.is_up:
                        reasons[link.endpoint] = f"the session with {link.name} ended"
    except TimeoutError:
        raise NoEngine(
            f"{len(told) - len(reasons)} engines did not answer within {ORDER_SECONDS:g} s",
            retry_after_seconds=5,
        ) from None
    num_done = sum(not reason for reason in reasons.values())
    failed = {reason for reason in reasons.values() if reason}
    if num_done and action == "unload_lora":
        failed = {reason for reason in failed if not reason.endswith(NOT_LOADED)}
    if failed:
        done = f" ({num_done} of {len(told)} engines did it)" if num_done else ""
        raise InvalidRequest(f"{'; '.join(sorted(failed))}{done}")
    return num_done
