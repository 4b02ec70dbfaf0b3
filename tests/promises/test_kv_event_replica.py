"""A replica publishes what its prefix cache holds, and says truthfully what of a prompt it reused."""

import itertools
from contextlib import contextmanager

import httpx
import msgspec
import pytest
import trio

from tests.ports import free_port
from tests.promises.replica_program import PATIENCE_SECS, healthy, started

pytest.importorskip("torch")
pytest.importorskip("tiktoken")
zmq = pytest.importorskip("zmq")

BLOCK = 16
ENTRIES = 16  # of the prefix cache
PATIENCE_MS = 1000 * PATIENCE_SECS
END = b"\xff" * 8
fresh = itertools.count(300)


def prompt(length):
    """Tokens that share no beginning with those of another call."""
    first = next(fresh)
    return [first, *(260 + (first * 7 + place * place) % 252 for place in range(length - 1))]


class Fleet:
    """A replica, and what a plain subscriber learns about it."""

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
        # A subscription needs its time: whatever was published is asked for again.
        while not self.events.poll(20):
            self.client.post("/flush_cache")
        self.read_until("AllBlocksCleared")

    def _socket(self, kind, endpoint):
        opened = self._context.socket(kind)
        opened.setsockopt(zmq.RCVTIMEO, PATIENCE_MS)
        opened.setsockopt(zmq.LINGER, 0)
        opened.connect(endpoint.replace("*", "127.0.0.1"))
        return opened

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
                for place, each in enumerate(hashes):
                    self.blocks[each] = parent, tokens[place * BLOCK : (place + 1) * BLOCK]
                    parent = each
            case {"type": "BlockRemoved", "block_hashes": hashes}:
                for each in hashes:
                    del self.blocks[each]
            case {"type": "AllBlocksCleared"}:
                self.blocks.clear()

    def read_until(self, kind):
        seen = len(self.types)
        while kind not in self.types[seen:]:
            self.read()

    def known(self, tokens):
        """The leading tokens that are cached, by the events."""
        parent = None
        for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
            block = (parent, tokens[start : start + BLOCK])
            found = [each for each, other in self.blocks.items() if other == block]
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
        asker = self._socket(zmq.DEALER, self.source["replay_endpoint"])
        asker.send_multipart([b"", first.to_bytes(8, "big")])
        answers = []
        while True:
            empty, topic, number, payload = asker.recv_multipart()
            assert (empty, topic) == (b"", b"")
            if number == END:
                asker.close()
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
    words = ("--model", "tiny", "--kv-events", endpoint, "--kv-replay", "tcp://*:0")
    with started(*words) as program, zmq.Context() as context:
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
    """With nothing in its cache."""
    running.client.post("/flush_cache")
    running.read_until("AllBlocksCleared")
    return running


def test_the_port_that_was_taken_is_reported_as_both_engines_do(running):
    port = int(running.source["endpoint"].removeprefix("tcp://*:"))
    assert running.source["publisher"] == "zmq"
    body = running.client.get("/server_info").json()["kv_events"]
    assert (body["endpoint_host"], body["endpoint_port_base"]) == ("*", port)
    assert (body["block_size"], body["dp_size"]) == (BLOCK, 1)


def test_numbers_have_no_gap(replica):
    for _ in range(3):
        replica.complete(prompt(20))
        replica.read()
    first = replica.numbers[0]
    assert replica.numbers == list(range(first, first + len(replica.numbers)))


def test_cached_tokens_are_those_of_the_blocks_that_were_published(replica):
    one, other = prompt(100), prompt(40)
    for tokens in (one, other):
        replica.complete(tokens)
        replica.read_until("BlockStored")
    for asked in (
        one[:50] + prompt(30),
        one[:16] + prompt(30),
        one[:15] + prompt(30),
        other + prompt(30),
        prompt(60),
    ):
        expected = replica.known(asked)
        assert expected <= replica.cached(asked) < expected + BLOCK or expected == 0
        if expected == 0:
            assert replica.cached(prompt(60)) == 0
        replica.read()


def test_generated_tokens_make_blocks_too(replica):
    begin = prompt(20)
    assert replica.complete(begin, count=40)["usage"]["completion_tokens"] == 40
    replica.read_until("BlockStored")
    # The last token was never computed: 59 are kept, of which 48 are complete blocks.
    assert len(replica.blocks) == 3
    leaf = [each for each in replica.blocks if each not in {p for p, _ in replica.blocks.values()}]
    text = []
    (at,) = leaf
    while at is not None:
        at, tokens = replica.blocks[at]
        text = tokens + text
    assert text[:20] == begin
    assert replica.cached(text + prompt(5)) >= 48


def test_evicted_blocks_are_removed_before_those_that_needed_the_room(replica):
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


def test_missed_batches_are_sent_again(replica):
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


def of_events(text):
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: {")]
    return [msgspec.json.decode(line) for line in lines]


def details(usage):
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def of_input(usage):
    return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]


def of_anthropic(usage):
    cached = usage["cache_read_input_tokens"]
    return usage["input_tokens"] + cached, cached


def of_meta(meta):
    return meta["prompt_tokens"], meta["cached_tokens"]


def last_usage(text):
    return [event["usage"] for event in of_events(text) if event.get("usage")][-1]


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
    "generate": ("/generate", {"text": TEXT} | SAMPLING, lambda a: of_meta(a.json()["meta_info"])),
    "generate, streamed": (
        "/generate", {"text": TEXT, "stream": True} | SAMPLING,
        lambda a: of_meta(of_events(a.text)[-1]["meta_info"]),
    ),
    "messages": (
        "/v1/messages", {"messages": CHAT}, lambda a: of_anthropic(a.json()["usage"]),
    ),
    "messages, streamed": (
        "/v1/messages", {"messages": CHAT, "stream": True},
        lambda a: of_anthropic(
            [event["usage"] for event in of_events(a.text) if event["type"] == "message_delta"][-1]
        ),
    ),
    "responses": ("/v1/responses", {"input": TEXT}, lambda a: of_input(a.json()["usage"])),
    "responses, streamed": (
        "/v1/responses", {"input": TEXT, "stream": True},
        lambda a: of_input(of_events(a.text)[-1]["response"]["usage"]),
    ),
    "tokens": (
        "/inference/v1/generate", {"token_ids": list(range(300, 340)), "sampling_params": {"max_tokens": 4}},
        lambda a: details(a.json()["usage"]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_an_answer_has_the_cached_tokens(replica, form):
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


def test_a_restarted_replica_begins_at_0_on_the_same_address():
    endpoint = f"tcp://*:{free_port()}"
    for _ in range(2):
        with publishing(endpoint) as replica:
            assert replica.source["endpoint"] == endpoint
            replica.complete(prompt(20))
            replica.read_until("BlockStored")
            first, (at, _, _) = replica.replay()[0]
            assert first == 0
            assert at > 0
