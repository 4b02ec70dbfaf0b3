"""A replica publishes its prefix cache, and reports how much of a prompt it reused."""

import itertools
from contextlib import contextmanager

import httpx
import msgspec
import pytest
import trio

from tests.ports import free_port
from tests.promises.support.replica_program import PATIENCE_SECS, healthy, started

pytest.importorskip("torch")
pytest.importorskip("tiktoken")
zmq = pytest.importorskip("zmq")

BLOCK = 16
ENTRIES = 16  # of the prefix cache
PATIENCE_MS = 1000 * PATIENCE_SECS
END = b"\xff" * 8
fresh = itertools.count(300)


def prompt(length):
    """Tokens that share no prefix with those of any other call."""
    first = next(fresh)
    return [first, *(260 + (first * 7 + index * index) % 252 for index in range(length - 1))]


class Fleet:
    """A client of a replica, and a plain subscriber of its events."""

    def __init__(self, url, context):
        self.client = httpx.Client(base_url=url, timeout=PATIENCE_SECS, verify=False)
        self._context = context
        self.blocks = {}  # hash -> (parent, tokens)
        self.numbers = []
        self.types = []

    def connect(self):
        (self.source,) = self.client.get("/kv_event_sources").json().values()
        self.events = self._socket(zmq.SUB, self.source["endpoint"])
        self.events.subscribe(b"")
        # A subscription takes effect with a delay: events are triggered until one arrives.
        while not self.events.poll(20):
            self.client.post("/flush_cache")
        self.read_until("AllBlocksCleared")

    def _socket(self, kind, endpoint):
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.RCVTIMEO, PATIENCE_MS)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(endpoint.replace("*", "127.0.0.1"))
        return socket

    def read(self):
        topic, number, payload = self.events.recv_multipart()
        assert topic == b""
        self.numbers.append(int.from_bytes(number, "big"))
        _, events, rank = msgspec.msgpack.decode(payload)
        assert rank == 0
        for event in events:
            self.apply(event)

    def apply(self, event):
        self.types.append(event["type"])
        match event:
            case {"type": "BlockStored", "block_hashes": hashes, "token_ids": tokens}:
                assert (event["block_size"], event["medium"]) == (BLOCK, "GPU")
                parent = event["parent_block_hash"]
                for index, block_hash in enumerate(hashes):
                    self.blocks[block_hash] = parent, tokens[index * BLOCK : (index + 1) * BLOCK]
                    parent = block_hash
            case {"type": "BlockRemoved", "block_hashes": hashes}:
                for block_hash in hashes:
                    del self.blocks[block_hash]
            case {"type": "AllBlocksCleared"}:
                self.blocks.clear()

    def read_until(self, kind):
        seen = len(self.types)
        while kind not in self.types[seen:]:
            self.read()

    def known(self, tokens):
        """The number of leading tokens that are cached according to the events."""
        parent = None
        for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
            block = (parent, tokens[start : start + BLOCK])
            found = [key for key, other in self.blocks.items() if other == block]
            if not found:
                return start
            (parent,) = found
        return len(tokens) - len(tokens) % BLOCK

    def complete(self, tokens, count=1):
        body = {"prompt": tokens, "max_tokens": count, "ignore_eos": True, "temperature": 0}
        body |= {"return_token_ids": True}
        answer = self.client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def cached(self, tokens):
        return self.complete(tokens)["usage"]["prompt_tokens_details"]["cached_tokens"]

    def replay(self, first=0):
        socket = self._socket(zmq.DEALER, self.source["replay_endpoint"])
        socket.send_multipart([b"", first.to_bytes(8, "big")])
        answers = []
        while True:
            empty, topic, number, payload = socket.recv_multipart()
            assert (empty, topic) == (b"", b"")
            if number == END:
                socket.close()
                return answers
            answers.append((int.from_bytes(number, "big"), msgspec.msgpack.decode(payload)))

    def close(self):
        self.events.close()
        self.client.close()


async def wait_healthy(program):
    async with program.client() as client:
        await healthy(client)


@contextmanager
def publishing(endpoint="tcp://*:0"):
    arguments = ("--model", "tiny", "--kv-events", endpoint, "--kv-replay", "tcp://*:0")
    with started(*arguments) as program, zmq.Context() as context:
        fleet = Fleet(program.url, context)
        trio.run(wait_healthy, program)
        fleet.connect()
        yield fleet
        fleet.close()


@pytest.fixture(scope="module")
def running():
    with publishing() as fleet:
        yield fleet


@pytest.fixture
def replica(running):
    """The replica with an empty cache."""
    running.client.post("/flush_cache")
    running.read_until("AllBlocksCleared")
    return running


def test_the_chosen_port_is_reported_in_the_forms_of_both_engines(running):
    port = int(running.source["endpoint"].removeprefix("tcp://*:"))
    assert running.source["publisher"] == "zmq"
    body = running.client.get("/server_info").json()["kv_events"]
    assert (body["endpoint_host"], body["endpoint_port_base"]) == ("*", port)
    assert (body["block_size"], body["dp_size"]) == (BLOCK, 1)


def test_sequence_numbers_have_no_gap(replica):
    for _ in range(3):
        replica.complete(prompt(20))
        replica.read()
    first = replica.numbers[0]
    assert replica.numbers == list(range(first, first + len(replica.numbers)))


def test_cached_tokens_are_those_of_the_published_blocks(replica):
    one, other = prompt(100), prompt(40)
    for tokens in (one, other):
        replica.complete(tokens)
        replica.read_until("BlockStored")
    for tokens in (
        one[:50] + prompt(30),
        one[:16] + prompt(30),
        one[:15] + prompt(30),
        other + prompt(30),
        prompt(60),
    ):
        expected = replica.known(tokens)
        assert expected <= replica.cached(tokens) < expected + BLOCK
        if expected == 0:
            assert replica.cached(prompt(60)) == 0
        replica.read()


def test_generated_tokens_are_published_in_blocks(replica):
    start = prompt(20)
    assert replica.complete(start, count=40)["usage"]["completion_tokens"] == 40
    replica.read_until("BlockStored")
    # The last token was not computed: 59 are cached, of which 48 are in complete blocks.
    assert len(replica.blocks) == 3
    parents = {parent for parent, _ in replica.blocks.values()}
    (block,) = [block for block in replica.blocks if block not in parents]
    sequence = []
    while block is not None:
        block, tokens = replica.blocks[block]
        sequence = tokens + sequence
    assert sequence[:20] == start
    assert replica.cached(sequence + prompt(5)) >= 48


def test_evicted_blocks_are_removed_before_new_ones_are_stored(replica):
    first = prompt(40)
    replica.complete(first)
    for _ in range(ENTRIES - 1):
        replica.complete(prompt(20))
    while len(replica.blocks) < 2 + ENTRIES - 1:
        replica.read()
    assert replica.known(first) == 32
    replica.complete(prompt(20))
    seen = len(replica.types)
    replica.read_until("BlockStored")
    assert replica.types[seen:] == ["BlockRemoved", "BlockRemoved", "BlockStored"]
    assert replica.known(first) == 0
    assert replica.cached(first) == 0


def test_a_flush_is_published_at_once(replica):
    replica.complete(prompt(20))
    replica.read_until("BlockStored")
    replica.client.post("/reset_prefix_cache")
    replica.read()
    assert replica.types[-1] == "AllBlocksCleared"


def test_missed_batches_are_replayed(replica):
    replica.complete(prompt(20))
    replica.read_until("BlockStored")
    last = replica.numbers[-1]
    answers = replica.replay()
    assert [number for number, _ in answers] == list(range(last + 1))
    assert [number for number, _ in replica.replay(last)] == [last]
    assert replica.replay(last + 1) == []
    ((_, [stored], _),) = (batch for number, batch in answers if number == last)
    assert stored["block_hashes"] == list(replica.blocks)


CHAT = [{"role": "user", "content": "What is the capital of France, and how long is the Seine?"}]


def events_of(text):
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: {")]
    return [msgspec.json.decode(line) for line in lines]


def details(usage):
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def responses_details(usage):
    return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]


def anthropic_details(usage):
    cached = usage["cache_read_input_tokens"]
    return usage["input_tokens"] + cached, cached


def meta_details(meta):
    return meta["prompt_tokens"], meta["cached_tokens"]


def last_usage(text):
    return [event["usage"] for event in events_of(text) if event.get("usage")][-1]


TEXT = "The sea is wide and the sky is high, and nobody has ever counted the waves."
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
SAMPLING = {"sampling_params": {"max_new_tokens": 4}}
FORMS = {
    "chat": ("/v1/chat/completions", {"messages": CHAT}, lambda a: details(a.json()["usage"])),
    "chat, streamed": (
        "/v1/chat/completions", {"messages": CHAT} | STREAM, lambda a: details(last_usage(a.text)),
    ),
    "completions": ("/v1/completions", {"prompt": TEXT}, lambda a: details(a.json()["usage"])),
    "completions, streamed": (
        "/v1/completions", {"prompt": TEXT} | STREAM, lambda a: details(last_usage(a.text)),
    ),
    "generate": ("/generate", {"text": TEXT} | SAMPLING, lambda a: meta_details(a.json()["meta_info"])),
    "generate, streamed": (
        "/generate", {"text": TEXT, "stream": True} | SAMPLING,
        lambda a: meta_details(events_of(a.text)[-1]["meta_info"]),
    ),
    "messages": (
        "/v1/messages", {"messages": CHAT}, lambda a: anthropic_details(a.json()["usage"]),
    ),
    "messages, streamed": (
        "/v1/messages", {"messages": CHAT, "stream": True},
        lambda a: anthropic_details(
            [event["usage"] for event in events_of(a.text) if event["type"] == "message_delta"][-1]
        ),
    ),
    "responses": ("/v1/responses", {"input": TEXT}, lambda a: responses_details(a.json()["usage"])),
    "responses, streamed": (
        "/v1/responses", {"input": TEXT, "stream": True},
        lambda a: responses_details(events_of(a.text)[-1]["response"]["usage"]),
    ),
    "tokens": (
        "/inference/v1/generate", {"token_ids": list(range(300, 340)), "sampling_params": {"max_tokens": 4}},
        lambda a: details(a.json()["usage"]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_response_reports_the_cached_tokens(replica, form):
    path, body, read = FORMS[form]
    body = {"model": "tiny", "max_tokens": 4, "max_output_tokens": 4} | body
    first, second = (read(replica.client.post(path, json=body)) for _ in range(2))
    total = first[0]
    assert total > 2 * BLOCK
    assert first == (total, 0)
    assert second == (total, total - 1)


def test_new_weights_clear_all_blocks(replica):
    replica.complete(prompt(40))
    replica.read_until("BlockStored")
    answer = replica.client.post("/update_weights_from_disk", json={"model_path": "tiny"})
    assert answer.status_code == 200, answer.text
    replica.read_until("AllBlocksCleared")
    assert replica.blocks == {}


def test_a_restarted_replica_numbers_its_events_from_0():
    endpoint = f"tcp://*:{free_port()}"
    for _ in range(2):
        with publishing(endpoint) as replica:
            assert replica.source["endpoint"] == endpoint
            replica.complete(prompt(20))
            replica.read_until("BlockStored")
            first, (timestamp, _, _) = replica.replay()[0]
            assert first == 0
            assert timestamp > 0
