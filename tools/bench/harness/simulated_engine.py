"""A worker in this process with the timing of an inference engine, and no model.

Continuous batching: a step decodes one token for every running request and prefills a bounded
number of prompt tokens; its duration grows with its work. Computed tokens of a session are kept in
a bounded LRU cache. Invariant: time passes only in steps, so `slowdown` affects all work.
"""

import json
from collections import OrderedDict, deque
from dataclasses import dataclass, field

import trio

from tools.bench.harness.simulated_worker import ANSWER, next_request

STEP_SECS = 0.008
SECS_PER_RUNNING = 0.0004
SECS_PER_PREFILL_TOKEN = 0.00006
PREFILL_TOKENS_PER_STEP = 512
CACHE_TOKENS = 32_000


@dataclass(slots=True)
class _Generation:
    session: str
    tokens: int  # of the prompt and the answer
    to_prefill: int
    to_decode: int
    done: trio.Event = field(default_factory=trio.Event)


class SimulatedEngine:
    """The engine. `slowdown` multiplies the duration of each step.

    `pace` is real seconds per simulated second; a busy machine needs more than 1.
    """

    def __init__(self, pace: float = 1.0, cache_tokens: int = CACHE_TOKENS) -> None:
        self._cache_tokens = cache_tokens
        self.pace = pace
        self.url = ""
        self.slowdown = 1.0
        self.turns = 0
        self.prompt_tokens = self.cached_tokens = 0
        self._cache: OrderedDict[str, int] = OrderedDict()  # tokens by session
        self._waiting: deque[_Generation] = deque()  # with prompt tokens to prefill
        self._running: list[_Generation] = []
        self._work = trio.Event()
        self._simulated_secs = self._slept_secs = 0.0

    @property
    def lateness(self) -> float:
        """Real by simulated duration of the steps: above 1 on a busy machine."""
        return self._slept_secs / self._simulated_secs if self._simulated_secs else 1.0

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled; `url` is set when it has started."""
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        self.url = f"http://127.0.0.1:{listener.socket.getsockname()[1]}"
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.run_steps)
            await nursery.start(trio.serve_listeners, self._connection, [listener])
            task_status.started()

    async def _connection(self, stream: trio.SocketStream) -> None:
        rest = b""
        try:
            while (found := await next_request(stream, rest)) is not None:
                head, body, rest = found
                if head.startswith(b"POST"):
                    await self.generate(json.loads(body))
                await stream.send_all(ANSWER)
        except trio.BrokenResourceError:
            pass  # the proxy has closed it

    async def generate(self, body: dict[str, str | int]) -> None:
        """Answer one request, with `session`, `prompt_tokens` and `max_tokens`."""
        session, prompt = str(body["session"]), int(body["prompt_tokens"])
        cached = min(self._cache.get(session, 0), prompt)
        self.turns += 1
        self.prompt_tokens += prompt
        self.cached_tokens += cached
        answer = int(body["max_tokens"])
        generation = _Generation(session, prompt + answer, prompt - cached, answer)
        self._waiting.append(generation)
        self._work.set()
        await generation.done.wait()

    async def run_steps(self) -> None:
        """Generate for the requests until cancelled."""
        while True:
            await self._work.wait()
            prefilled = self._prefill()
            secs = STEP_SECS + SECS_PER_RUNNING * len(self._running)
            secs = (secs + SECS_PER_PREFILL_TOKEN * prefilled) * self.slowdown * self.pace
            began_at = trio.current_time()
            await trio.sleep(secs)
            self._simulated_secs += secs
            self._slept_secs += trio.current_time() - began_at
            self._decode()
            if not self._waiting and not self._running:
                self._work = trio.Event()

    def _prefill(self) -> int:
        """Prefill prompts in order of arrival, up to the limit of a step."""
        room = PREFILL_TOKENS_PER_STEP
        while self._waiting and room:
            first = self._waiting[0]
            taken = min(room, first.to_prefill)
            first.to_prefill -= taken
            room -= taken
            if not first.to_prefill:
                self._running.append(self._waiting.popleft())
        return PREFILL_TOKENS_PER_STEP - room

    def _decode(self) -> None:
        for each in self._running:
            each.to_decode -= 1
            if each.to_decode <= 0:
                self._remember(each)
                each.done.set()
        self._running = [each for each in self._running if each.to_decode > 0]

    def _remember(self, ended: _Generation) -> None:
        self._cache[ended.session] = ended.tokens
        self._cache.move_to_end(ended.session)
        while sum(self._cache.values()) > self._cache_tokens and len(self._cache) > 1:
            self._cache.popitem(last=False)
