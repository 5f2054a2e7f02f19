"""A decode step gives the device one copy in, takes one copy out, and waits once.

On a CPU nothing waits; what would wait on a GPU is caught as it is called: every way to turn a
tensor on the device into Python numbers, or Python numbers into one without `Device.upload`.
"""

from __future__ import annotations

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from foveal_runtime.engine.types.step import ScheduledRequest, StepPlan
from foveal_runtime.model.device import Device, Fetch
from foveal_runtime.plan.sampling import SamplingParams
from tests.support.models.rerun_capturer import RerunCapturer

# Calls that read a tensor's numbers, or make one of host numbers by a copy that waits.
WAITING_CALLS = {
    "item", "tolist", "numpy", "cpu", "nonzero", "argwhere", "masked_select", "unique", "equal",
    "allclose", "is_nonzero", "__bool__", "__int__", "__float__", "__index__",
    "tensor", "as_tensor", "new_tensor", "from_numpy", "__iter__", "__contains__", "__array__",
    "bincount", "synchronize",
}  # fmt: skip
WAITING_OPERATORS = {
    "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal",
    "aten::is_nonzero", "aten::_unique2", "aten::unique_consecutive", "aten::bincount",
}  # fmt: skip


class NoCalls(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = ""
        assert name not in WAITING_CALLS, f"{name} waits for the device"
        if name in ("__getitem__", "__setitem__"):
            keys = args[1] if isinstance(args[1], tuple) else (args[1],)
            for key in keys:
                assert not isinstance(key, list), "a list as index is copied to the device"
                assert not (isinstance(key, torch.Tensor) and key.dtype == torch.bool), (
                    "a mask as index is counted on the host"
                )
        return func(*args, **(kwargs or {}))


class NoOperators(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.name().split(".")[0] not in WAITING_OPERATORS, f"{func} waits for the device"
        return func(*args, **(kwargs or {}))


class WatchedFetch(Fetch):
    def __init__(self, room, tensors) -> None:
        self._room = room
        super().__init__(tensors, is_pinned=False)

    def wait(self):
        self._room.num_waits += 1
        with torch._C.DisableTorchFunction():
            return super().wait()


class Watched(Device):
    """Counts what a step sends, fetches and waits for; inside, anything goes."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.clear()

    def clear(self) -> None:
        self.num_uploads = self.num_fetches = self.num_waits = 0

    def upload(self, *arrays):
        self.num_uploads += 1
        with torch._C.DisableTorchFunction():
            return super().upload(*arrays)

    def fetch(self, tensors):
        self.num_fetches += 1
        return WatchedFetch(self, tensors)


def plan(step: int, jobs, count: int, sample: bool = True) -> StepPlan:
    windows = []
    for i, job in enumerate(jobs):
        blocks = list(range(1 + 8 * i, 9 + 8 * i))
        windows.append(ScheduledRequest(job.request_id, job.computed, count, blocks, sample))
        job.computed += count
    return StepPlan(step, scheduled=windows)


def start(one, samplings) -> list:
    """Requests whose prompts are computed."""
    jobs = []
    for i, sampling in enumerate(samplings):
        prompt = one.prompt(30 + i, num_text=9)
        job = one.job(f"r{i}", prompt)
        job.sampling = sampling
        jobs.append(job)
        announced = StepPlan(0)
        one.driver.announce(job, announced)
        one.runner.execute(announced)
    one.runner.execute(plan(1, jobs, len(jobs[0].prompt)))
    return jobs


SAMPLINGS = {
    "greedy": [{"temperature": 0.0}] * 3,
    "drawn": [{"temperature": 0.8, "seed": 3}, {"temperature": 1.0, "top_k": 5, "seed": 4},
              {"temperature": 0.7, "min_p": 0.1, "seed": 5}],
    "with logprobs": [{"temperature": 0.0, "logprobs": 2}, {"logprobs": 0}, {}],
}  # fmt: skip


@pytest.mark.parametrize("recorded", [False, True], ids=["computed", "recorded"])
@pytest.mark.parametrize("kind", SAMPLINGS)
def test_a_decode_step(kind: str, recorded: bool, bench) -> None:
    room = Watched()
    one = bench("llama", room=room, attention="torch")
    one.driver.reuse = False
    if recorded:
        one.runner.record_decoding(RerunCapturer(), max_num_seqs=4, max_model_len=96)
    jobs = start(one, [SamplingParams(max_tokens=9, **o) for o in SAMPLINGS[kind]])
    one.sampler.is_recording = False
    room.clear()
    with NoCalls(), NoOperators():
        running = one.runner.submit(plan(2, jobs, 1))
        assert room.num_waits == 0
        result = running.result()
    assert len(result.sampled) == len(jobs)
    # The batch; rows and options of those that draw, bounds of their choice; rows with logprobs.
    assert room.num_uploads == {"greedy": 1, "drawn": 3, "with logprobs": 3}[kind]
    assert (room.num_fetches, room.num_waits) == (1, 1)


@pytest.mark.parametrize("recorded", [False, True], ids=["computed", "recorded"])
@pytest.mark.parametrize("name", ["llama", "qwen2_vl"])
def test_a_step_submitted_ahead_reads_its_tokens_on_the_device(
    name: str, recorded: bool, bench
) -> None:
    room = Watched()
    one = bench(name, room=room, attention="torch")
    one.driver.reuse = False
    if recorded:
        one.runner.record_decoding(RerunCapturer(), max_num_seqs=4, max_model_len=96)
    jobs = start(one, [SamplingParams(max_tokens=9, temperature=0.0, logprobs=1)] * 2)
    plain = bench(name)
    plain.driver.reuse = False
    others = start(plain, [SamplingParams(max_tokens=9, temperature=0.0)] * 2)
    ours, theirs, running = [], [], None
    room.clear()
    for step in range(2, 7):
        ahead = one.runner.submit(plan(step, jobs, 1))
        if running is not None:
            ours.append([s.token_id for s in running.result().sampled])
        running = ahead
        theirs.append([s.token_id for s in plain.runner.execute(plan(step, others, 1)).sampled])
    assert room.num_waits == 4
    ours.append([s.token_id for s in running.result().sampled])
    assert ours == theirs
    assert one.runner._sequences["r0"].token_ids == plain.runner._sequences["r0"].token_ids


def test_the_watch_sees_what_waits() -> None:
    """The control: each of these would wait on a GPU."""
    tensor = torch.arange(4)
    for waits in (
        lambda: tensor.tolist(),
        lambda: int(tensor[0]),
        lambda: bool(tensor.any()),
        lambda: tensor[tensor > 1],
        lambda: torch.tensor([1, 2]),
        lambda: tensor[[0, 1]],
    ):
        with pytest.raises(AssertionError), NoCalls(), NoOperators():
            waits()
