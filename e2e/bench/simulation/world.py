"""A deployment in virtual time: the product's client, mirror, scheduler and caches, paid in costs.

`EngineClient` (routing, links, mirrors), `EngineCore` (receiver, scheduler, encoder cache, prefix
cache) and the codec between them are imported and run as they are. Simulated are time, the network
and what computes: a step takes what `Costs` say of its plan.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Sequence
from typing import NamedTuple

import msgspec

from e2e.bench.simulation.costs import ROLES, Charges, CostRunner, Costs, Deployment
from e2e.bench.simulation.virtual import Cores, Thread
from foveal_runtime.engine.process.assemble import LoadedEngine, assemble_core
from foveal_runtime.engine.process.core import EngineCore
from foveal_runtime.engine.types.step import (
    DoneStep,
    ModelRunner,
    StepPlan,
)
from foveal_runtime.frontend.common.single_flight import SingleFlight
from foveal_runtime.frontend.engines.client import EngineClient
from foveal_runtime.frontend.engines.routing import Router
from foveal_runtime.frontend.items.prepared import ItemCost, PreparedItem, PreparedRequest
from foveal_runtime.frontend.items.processor_cache import ProcessorCache
from foveal_runtime.frontend.items.source import Buffer, GivenBytes, ItemSource, RawMedia
from foveal_runtime.mirror.messages import (
    Bye,
    DownMessage,
    EngineHeartbeat,
    Req,
    SessionId,
    Welcome,
)
from foveal_runtime.plan.config import EngineAddress, FrontendConfig, ModelConfig
from foveal_runtime.plan.sampling import SamplingParams
from foveal_runtime.wire import codec
from foveal_runtime.wire.item import meta_of, read_header
from foveal_runtime.wire.transport import ByteCounters, Frames, LinkDown

HEARTBEAT_SECONDS = 1.0


class Ask(NamedTuple):
    """One request: prompt tokens with one placeholder for each of `images`, and the tokens that
    the model is going to say."""

    tokens: list[int]
    images: tuple[int, ...]
    reply: tuple[int, ...]


class Answer(NamedTuple):
    """Seconds of virtual time; `num_tokens` of the reply that came."""

    sent: float
    first: float
    done: float
    num_tokens: int


def loaded(deployment: Deployment, runner: ModelRunner) -> LoadedEngine:
    """A deployment's model as an engine has it."""
    return LoadedEngine(
        runner=runner,
        num_blocks=deployment.num_blocks,
        max_model_len=deployment.max_model_len,
        largest=deployment.largest,
        largest_request_bytes=deployment.largest_request_bytes,
        namespace=World.namespace,
    )


class Engine:
    """An `EngineCore` and its loop. What a step makes known leaves when the step's time is over;
    what arrives meanwhile is looked at then."""

    def __init__(self, world: World, name: str, runner: ModelRunner | None) -> None:
        deployment = world.deployment
        self._charges = world.charges["engine"]
        self.name = name
        self.thread = Thread(world.cores)
        self._costed = CostRunner(deployment.traits, world.costs, world.reply_of, self._spend)
        self.runner: ModelRunner = runner or self._costed
        config = msgspec.structs.replace(deployment.engine, engine_id=name)
        self.core: EngineCore = assemble_core(
            config,
            loaded(deployment, self),
            send=self._send,
            clock=asyncio.get_running_loop().time,
            boot=1,
        )
        self.links: dict[str, Link] = {}
        self.sent: Counter[str] = Counter()  # messages down, by kind
        self.step_seconds = 0.0
        self._sids: dict[str, SessionId] = {}
        self._inbox: list[tuple[str, Frames]] = []
        self._news = asyncio.Event()
        self._held: list[tuple[float, str, DownMessage]] | None = None
        self._owed = 0.0  # seconds of work beside steps that were not spent yet
        self._step_seconds = 0.0

    # ---- the runner, watched --------------------------------------------------------------------
    def __getattr__(self, name: str) -> object:
        return getattr(self.runner, name)

    def submit(self, plan: StepPlan, between: Callable[[], None] | None = None) -> DoneStep:
        """What is said from now on is said when so much of the step is over."""
        self._held = self._held or []
        result = self.runner.submit(plan, between).result()
        self._owed += self._charges.add(step=1, token=len(result.sampled))
        if self.runner is not self._costed:  # a real one: others arrive while it computes
            self._spend(result.encode_seconds + result.forward_seconds)
        return DoneStep(result)

    def _spend(self, seconds: float) -> None:
        self._step_seconds += seconds

    # ---- the loop -------------------------------------------------------------------------------
    async def run(self) -> None:
        while True:
            if not self.core.has_work and not self._inbox:
                await self._wait()
            began = asyncio.get_running_loop().time()
            self._take_in()
            self._step_seconds = 0.0
            self.core.step()
            seconds, self._owed = self._step_seconds + self._owed, 0.0
            self.step_seconds += self._step_seconds
            held, self._held = self._held or [], None
            spent = 0.0
            for offset, fid, message in held:
                await self.thread.work(offset - spent)
                spent = max(spent, offset)
                self._send(fid, message)
            await self.thread.work(seconds - spent)
            if seconds > 0:
                self._costed.slowness = (asyncio.get_running_loop().time() - began) / seconds

    async def _wait(self) -> None:
        due = self.core.seconds_to_note()
        timer = None
        if due is not None:
            timer = asyncio.get_running_loop().call_later(due + 1e-6, self._news.set)
        await self._news.wait()
        self._news.clear()
        if timer is not None:
            timer.cancel()

    def _take_in(self) -> None:
        self._news.clear()
        received, self._inbox = self._inbox, []
        for fid, frames in received:
            message = codec.decode_up(frames)
            values = codec.open_values(message, frames, None)
            self._owed += self._charges.add(new_item=len(values))
            if isinstance(message, Req):
                self._owed += self._charges.add(request=1, item=len(message.items))
            self.core.on_message(fid, message, values)

    def receive(self, fid: str, frames: Frames) -> None:
        self._inbox.append((fid, frames))
        self._news.set()

    def _send(self, fid: str, message: DownMessage) -> None:
        if self._held is not None:
            self._held.append((self._step_seconds, fid, message))
            return
        if isinstance(message, Welcome):
            self._sids[fid] = message.sid
        elif isinstance(message, Bye):
            self._sids.pop(fid, None)
        frames = [memoryview(frame) for frame in codec.encode_down(message)]
        self._owed += self._charges.add(message=1)
        self.sent[type(message).__name__] += 1
        self.links[fid].deliver(frames)

    async def beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            for fid, sid in list(self._sids.items()):
                pulse = EngineHeartbeat(sid, self.core.stats.num_steps, self.core.has_work)
                self.links[fid].deliver([memoryview(f) for f in codec.encode_down(pulse)])


class Link:
    """`wire.transport.FrontendTransport` over a network that has a delay and a bandwidth. `reader`:
    the event loop that what arrives is work for; None: nobody's."""

    def __init__(
        self, world: World, endpoint: str, frontend_id: str, reader: Thread | None
    ) -> None:
        self._reader, self._charges = reader, world.charges["frontend"]
        self.counters = ByteCounters()
        self.frontend_id = frontend_id
        self._engine = world.engines[endpoint]
        self._costs = world.costs
        self._down: asyncio.Queue[Frames] = asyncio.Queue()
        self._free_at = [0.0, 0.0]  # up, down
        self._on_way: tuple[deque[Frames], deque[Frames]] = deque(), deque()
        self._is_closed = False
        self._engine.links[frontend_id] = self

    async def connected(self) -> None: ...

    def send(self, frames: Sequence[Buffer]) -> None:
        if self._is_closed:
            raise LinkDown("closed")
        self.counters.count_sent(frames)
        views = [memoryview(frame).toreadonly() for frame in frames]
        self._after(0, views)

    def deliver(self, frames: Frames) -> None:
        if not self._is_closed:
            self._after(1, frames)

    def _after(self, way: int, frames: Frames) -> None:
        loop = asyncio.get_running_loop()
        size = sum(map(len, frames))
        seconds = self._costs.network_seconds + size / self._costs.network_bytes_per_second
        self._free_at[way] = max(loop.time() + seconds, self._free_at[way])
        self._on_way[way].append(frames)
        loop.call_at(self._free_at[way], self._arrive, way)  # equal times: in any order

    def _arrive(self, way: int) -> None:
        frames = self._on_way[way].popleft()
        if way:
            self._down.put_nowait(frames)
        else:
            self._engine.receive(self.frontend_id, frames)

    async def recv(self) -> Frames:
        frames = await self._down.get()
        if self._reader is not None:
            await self._reader.work(self._charges.add(message=1))
        self.counters.count_received(frames)
        return frames

    def close(self) -> None:
        self._is_closed = True


def connect(world: World, name: str, reader: Thread | None = None) -> EngineClient:
    """A client of all engines; its links open in `start`."""
    engines = tuple(EngineAddress(endpoint=endpoint) for endpoint in world.engines)
    config = FrontendConfig(model=ModelConfig(path="/nowhere"), engines=engines, frontend_id=name)

    def open_link(endpoint: str) -> Link:
        return Link(world, endpoint, client.frontend_id, reader)

    client = EngineClient(config, world.namespace, open_transport=open_link)
    if world.policy is not None:
        client.router = world.policy()
    return client


class Frontend:
    """A `ProcessorCache`, an event loop and a media worker in front of an `EngineClient`."""

    def __init__(self, world: World, client: EngineClient, loop: Thread) -> None:
        self._world = world
        self._charges, self._asking = world.charges["frontend"], world.charges["client"]
        self.client, self.loop = client, loop
        self.worker = Thread(world.cores)
        self.cache = ProcessorCache(
            world.deployment.processor_bytes, clock=asyncio.get_running_loop().time
        )
        self._processing: SingleFlight[bytes, Buffer] = SingleFlight()

    async def answer(self, name: str, ask: Ask, client: Thread) -> Answer:
        """What a client sees that sends this request here."""
        loop = asyncio.get_running_loop()
        used = list(dict.fromkeys(ask.images))
        sent = loop.time()
        first, count = 0.0, 0
        await client.work(self._asking.add(request=1, item=len(ask.images)))
        await self.loop.work(self._charges.add(request=1, item=len(ask.images)))
        items = [await self.prepare(image) for image in used]
        request = PreparedRequest(
            name, ask.tokens, items, self._world.places(ask, used),
            SamplingParams(max_tokens=len(ask.reply), ignore_eos=True),
        )  # fmt: skip
        async for output in self.client.generate(request):
            count += len(output.token_ids)
            await self.loop.work(self._charges.add(token=1))
            await client.work(self._asking.add(token=1))
            first = first or loop.time()
        return Answer(sent, first, loop.time(), count)

    async def prepare(self, image: int) -> PreparedItem:
        """As `MediaInput` does, with a worker that takes time and nothing else."""
        key, cost, world = image.to_bytes(32, "big"), ItemCost(), self._world

        async def work() -> Buffer:
            cost.was_processed = True
            await self.worker.work(world.charges["worker"].add(new_item=1))
            self.cache.commit(key, world.item)
            return world.item

        def make(raw: RawMedia) -> Coroutine[None, None, Buffer]:
            return self._processing.run(key, work)

        source = ItemSource(key, self.cache, self.client.stats, GivenBytes(b""), make)
        if self.cache.get(key) is None and self.client.lookup_item(key) is None:
            await self.loop.work(self._charges.add(new_item=1))
            source.retain(await source.value())
        return PreparedItem(key, 0, source, len(world.item), world.meta, cost=cost)


class World:
    """`num_frontends` x `num_engines` of a deployment, inside a running virtual loop.

    Args:
        runner: obeys the plans of the one engine, instead of a `CostRunner`.
        policy: makes each client's router; None: the product's.
        num_clients: frontends that share links and mirrors are one client; 0: each has its own.
    """

    namespace = b"n" * 16

    def __init__(
        self,
        deployment: Deployment,
        costs: Costs,
        num_frontends: int,
        num_engines: int,
        *,
        cores: Cores | None = None,
        runner: ModelRunner | None = None,
        item: bytes = b"",
        policy: Callable[[], Router] | None = None,
        num_clients: int = 0,
    ) -> None:
        self.deployment, self.costs, self.policy = deployment, costs, policy
        self.charges = {role: Charges(getattr(costs, role)) for role in ROLES}
        self.cores = cores or Cores()
        self.item = item or deployment.item()
        self.meta = meta_of(read_header(self.item))
        self.replies: dict[str, tuple[int, ...]] = {}
        self.engines: dict[str, Engine] = {}
        for index in range(num_engines):
            self.engines[f"tcp://e{index}:1"] = Engine(self, f"e{index}", runner)
        loops = [Thread(self.cores) for _ in range(num_frontends)]
        readers = [None] * num_clients or loops
        self.clients = [connect(self, f"f{i}", reader) for i, reader in enumerate(readers)]
        self.frontends = [
            Frontend(self, self.clients[i % len(self.clients)], loop)
            for i, loop in enumerate(loops)
        ]
        self.client = Thread(self.cores)
        self.answers: list[Answer] = []
        self._names = itertools.count()
        self._tasks: list[asyncio.Task[None]] = []
        self._main: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None

    def reply_of(self, request_id: str, index: int) -> int:
        """Engines name a request NAME.ATTEMPT-SERIAL."""
        return self.replies[request_id.partition(".")[0]][index]

    def places(self, ask: Ask, used: Sequence[int]) -> list[tuple[int, int]]:
        marks = [i for i, t in enumerate(ask.tokens) if t == self.deployment.placeholder]
        return [(at, used.index(image)) for at, image in zip(marks, ask.images, strict=True)]

    async def __aenter__(self) -> World:
        for engine in self.engines.values():
            self._tasks += [asyncio.create_task(engine.run()), asyncio.create_task(engine.beat())]
        self._main = asyncio.current_task()
        for task in self._tasks:
            task.add_done_callback(self._ended)
        for client in self.clients:
            await client.start()
        while any(c.num_ready_engines() < len(self.engines) for c in self.clients):  # noqa: ASYNC110
            await asyncio.sleep(0.01)  # virtual
        return self

    async def __aexit__(self, *_: object) -> None:
        for client in self.clients:
            await client.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._failure is not None:
            raise self._failure

    def _ended(self, task: asyncio.Task[None]) -> None:
        """An engine that fails ends the run: its requests would wait forever."""
        if not task.cancelled() and task.exception() is not None and self._main is not None:
            self._failure = task.exception()
            self._main.cancel()

    async def ask(self, frontend: int, ask: Ask) -> Answer:
        name = f"r{next(self._names)}"
        self.replies[name] = ask.reply
        answer = await self.frontends[frontend].answer(name, ask, self.client)
        del self.replies[name]
        self.answers.append(answer)
        return answer

    def cpu(self) -> dict[str, float]:
        """CPU seconds so far, by role."""
        found = {role: charges.seconds for role, charges in self.charges.items()}
        found["engine"] += sum(engine.step_seconds for engine in self.engines.values())
        return found

    def hits(self) -> dict[str, tuple[float, float]]:
        """(hits, lookups) by cache, as /metrics counts them."""
        stats = [client.stats for client in self.clients]
        cores = [engine.core for engine in self.engines.values()]
        encoders = [core.scheduler.encoder for core in cores]
        return {
            "ipc": (sum(sum(s.mm_hits) for s in stats), sum(sum(s.mm_queries) for s in stats)),
            "encoder": (
                sum(sum(e.hits.values()) for e in encoders),
                sum(sum(e.queries.values()) for e in encoders),
            ),
            "prefix": (
                sum(c.stats.num_prefix_hit_tokens for c in cores),
                sum(c.stats.num_prefix_query_tokens for c in cores),
            ),
        }


async def converse(world: World, talks: Sequence[Sequence[Ask]], concurrency: int) -> None:
    """As the bench's client: so many conversations at a time, each at one frontend."""
    places = asyncio.Semaphore(concurrency)

    async def talk(index: int) -> None:
        async with places:
            for ask in talks[index]:
                await world.ask(index % len(world.frontends), ask)

    await asyncio.gather(*(talk(index) for index in range(len(talks))))
