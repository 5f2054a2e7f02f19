"""Administration of one engine, as frontends pass it on: caches and LoRA adapters.

Made by `core`, called between two steps.
"""

from __future__ import annotations

import logging
from collections import deque

import msgspec

from foveal_runtime.engine.scheduler.scheduler import Scheduler
from foveal_runtime.engine.types.step import LoraTable
from foveal_runtime.mirror.messages import Control
from foveal_runtime.mirror.receiver import Receiver
from foveal_runtime.plan.errors import NotFound, StartupError
from foveal_runtime.plan.lora import NOT_LOADED, LoraRef, LoraSource, check_lora_names
from foveal_runtime.telemetry.ghosts import GhostLists
from foveal_runtime.wire import codec
from foveal_runtime.wire.messages import LoraReport

_LOG = logging.getLogger(__name__)
_MAX_OUTCOMES = 16


class Controls:
    """Orders of frontends that concern the engine, not a request.

    Attributes:
        lora_version: grows with every change of `loras`.
    """

    def __init__(
        self, scheduler: Scheduler, receiver: Receiver, loras: LoraTable, ghosts: GhostLists
    ) -> None:
        self._scheduler = scheduler
        self._receiver = receiver
        self._loras = loras
        self._ghosts = ghosts
        self._outcomes: deque[tuple[int, str]] = deque(maxlen=_MAX_OUTCOMES)
        self.lora_version = 0

    @property
    def loras(self) -> LoraReport:
        """What frontends must know of the adapters."""
        return LoraReport(self._loras.refs, tuple(self._outcomes))

    def hold_lora(self, ref: LoraRef | None) -> object | None:
        """What keeps the adapter for a request, which may run long after it is unloaded. Raises
        NotFound for one that is not loaded here."""
        held = None if ref is None else self._loras.hold(ref)
        if ref is not None and held is None:
            raise NotFound(f"the LoRA adapter {ref.name!r} was unloaded", param="model")
        return held

    def obey(self, control: Control) -> None:
        action = control.action
        if action == "reset_encoder":
            _LOG.info("%s: %d entries", action, self._scheduler.reset_encoder_cache())
        elif action == "reset_prefix":
            _LOG.info("%s: %d entries", action, self._scheduler.reset_prefix_cache())
        elif action in ("reset_mm", "resize_ipc", "ping"):
            # The receiver's business; a ping asks for nothing but the acknowledgement.
            if action == "reset_mm":
                self._ghosts.reset()
            self._ghosts.resize(self._receiver.store.capacity_bytes)
        elif action in ("load_lora", "unload_lora") and len(control.lora) == 2:
            self._change_loras(control)
        else:
            _LOG.warning("unknown control action %r", action)

    def _change_loras(self, control: Control) -> None:
        source = LoraSource(*control.lora)
        info = codec.decode_info(self._receiver.info)
        error = ""
        try:
            if control.action == "load_lora":
                check_lora_names([source.name])
                self._loras.load(source)
            elif not self._loras.unload(source.name):
                error = f"LoRA adapter {source.name!r}: {NOT_LOADED}"
        except StartupError as refusal:
            error = refusal.message
        except Exception as failure:  # a fault of one adapter must not end what the engine serves
            _LOG.exception("%s %s", control.action, source.name)
            error = f"LoRA adapter {source.name!r}: {type(failure).__name__}, see the engine's log"
        _LOG.info("%s %s: %s", control.action, source.name, error or "done")
        self._outcomes.append((control.value, error))
        self.lora_version += 1
        self._receiver.info = codec.encode_info(
            msgspec.structs.replace(info, loras=self._loras.refs)
        )
