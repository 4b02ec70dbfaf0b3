"""Data-parallel ranks behind one URL: the requests that the engine receives for each rank."""

import json
from collections import Counter
from contextlib import asynccontextmanager

import pytest
import trio

from omni_proxy.config.overlay import desired_workers
from omni_proxy.config.state import SavedState
from tests.fleet.entries import NOW
from tests.promises.support.clients import CHAT, post
from tests.promises.support.dataplane_fixture import configured, run_dataplane
from tests.promises.support.fakes import (
    CHUNKED_HEAD,
    LAST_CHUNK,
    answering,
    chunk,
    counted,
    fake_workers,
)

HEADER = "x-data-parallel-rank"
JSON_ROUTES = [
    "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/inference/v1/generate",
    "/v1/messages", "/v1/responses", "/v1/rerank", "/tokenize", "/v1/audio/speech",
]  # fmt: skip
ODD = b' {"text" : "a",\t"a": 1, "a": 2, "x": 1.0e0, "t": "\\u00e4"}\r\n'


def with_ranks(url, ranks, more=""):
    return f'{more}\n[[workers]]\nurl = "{url}"\nranks = {ranks}\n'


class Recorder:
    """An engine that keeps the headers and the body of each request."""

    def __init__(self):
        self.heads = []
        self.bodies = []
        self.connections = set()

    async def script(self, call):
        self.heads.append(call.fields)
        self.bodies.append(call.body)
        self.connections.add(call)
        await call.send(counted(b"{}"))

    def ranks(self):
        return [[value for name, value in head if name == HEADER] for head in self.heads]


@asynccontextmanager
async def run_with_ranks(ranks=4, more=""):
    """Runs a data plane with one worker; yields it, a client and the worker's recorder."""
    recorder = Recorder()
    async with (
        fake_workers(recorder.script) as (worker,),
        run_dataplane(worker, config=with_ranks(worker.url, ranks, more)) as opened,
        opened.client() as client,
    ):
        yield opened, client, recorder


async def ask(client, request):
    await client.send(request)
    return await client.answer()


@pytest.mark.parametrize("path", JSON_ROUTES)
async def test_the_rank_is_in_the_header_and_the_body_is_unchanged(path):
    async with run_with_ranks() as (_, client, recorder):
        for _ in range(8):  # the second and later ones use the fast path
            assert (await ask(client, post(ODD, path=path))).status == 200
    assert recorder.ranks() == [[str(n % 4)] for n in range(8)]
    assert set(recorder.bodies) == {ODD}
    assert len(recorder.connections) == 1


@pytest.mark.parametrize(
    "body",
    [
        ODD,
        b'{"input_ids": [1, 2], "sampling_params": {"routed_dp_rank": 7}}',
        b'{"text": "a", "x": NaN}',
        b'\xef\xbb\xbf{"text": "a"}',
        b'{"text": "' + b"a" * 100_000 + b'"}',
        b'{"text": "' + b"a" * 2_000_000 + b'"}',
        b'{"text": "' + b"a" * 9_000_000 + b'"}',
    ],
    ids=["odd", "nested", "nan", "bom", "100 kB", "2 MB", "9 MB"],
)
async def test_a_body_for_generate_gets_the_rank_key_and_keeps_all_other_bytes(body):
    async with run_with_ranks(3) as (_, client, recorder):
        for _ in range(4):
            assert (await ask(client, post(body, path="/generate"))).status == 200
    before, brace, after = body.partition(b"{")
    assert recorder.ranks() == [["0"], ["1"], ["2"], ["0"]]
    assert recorder.bodies == [
        b'%b%b"routed_dp_rank":%d,%b' % (before, brace, n % 3, after) for n in range(4)
    ]


@pytest.mark.parametrize(
    ("body", "forwarded"),
    [
        (b"{}", b'{"routed_dp_rank":0}'),
        (b'{"routed_dp_rank": null, "a": 1}', b'{"routed_dp_rank": 0, "a": 1}'),
        (b'{"data_parallel_rank": null}', b'{"routed_dp_rank":0,"data_parallel_rank": null}'),
    ],
)
async def test_an_empty_body_or_a_null_key_for_generate_gets_the_rank_key(body, forwarded):
    async with run_with_ranks() as (_, client, recorder):
        assert (await ask(client, post(body, path="/generate"))).status == 200
    assert recorder.bodies == [forwarded]


async def test_a_chunked_body_for_generate_gets_the_rank_key():
    request = (
        b"POST /generate HTTP/1.1\r\nhost: proxy\r\ncontent-type: application/json\r\n"
        b"transfer-encoding: chunked\r\n\r\n" + chunk(b'{"te') + chunk(b'xt": "a"}') + LAST_CHUNK
    )
    async with run_with_ranks() as (_, client, recorder):
        assert (await ask(client, request)).status == 200
    assert recorder.bodies == [b'{"routed_dp_rank":0,"text": "a"}']


async def test_a_body_for_generate_that_is_not_json_is_unchanged():
    async with run_with_ranks() as (_, client, recorder):
        sent = post(b"a=1", path="/generate", kind="content-type: a/b")
        assert (await ask(client, sent)).status == 200
    assert (recorder.ranks(), recorder.bodies) == ([["0"]], [b"a=1"])


@pytest.mark.parametrize("name", ["X-data-parallel-rank", "X-Data-Parallel-Rank", HEADER.upper()])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/generate"])
async def test_a_rank_in_the_header_is_used_and_forwarded_once(name, path):
    async with run_with_ranks() as (_, client, recorder):
        for _ in range(3):
            assert (await ask(client, post(CHAT, f"{name}:  2 ", path=path))).status == 200
    assert recorder.ranks() == [["2"]] * 3
    forwarded = b'{"routed_dp_rank":2,' + CHAT[1:] if path == "/generate" else CHAT
    assert recorder.bodies == [forwarded] * 3


@pytest.mark.parametrize("key", ["routed_dp_rank", "data_parallel_rank"])
@pytest.mark.parametrize("size", [1, 2_000_000, 9_000_000])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/generate"])
async def test_a_rank_in_the_body_is_used_and_the_body_is_unchanged(key, size, path):
    body = json.dumps({"text": "a" * size, key: 3}).encode()
    async with run_with_ranks() as (_, client, recorder):
        for _ in range(2):
            assert (await ask(client, post(body, path=path))).status == 200
    assert recorder.ranks() == [["3"]] * 2
    assert recorder.bodies == [body] * 2


@pytest.mark.parametrize(
    ("body", "fields", "message"),
    [
        (CHAT, [f"{HEADER}: 4"], "data-parallel rank 4 does not exist"),
        (b'{"routed_dp_rank": 9}', [], "data-parallel rank 9 does not exist"),
        (b'{"data_parallel_rank": "x"}', [], "is not a data-parallel rank"),
        (CHAT, [f"{HEADER}: abc"], "is not a data-parallel rank"),
        (CHAT, [f"{HEADER}: -1"], "is not a data-parallel rank"),
        (CHAT, [f"{HEADER}: 1", f"{HEADER}: 2"], "is not a data-parallel rank"),
        (b'{"routed_dp_rank": 1}', [f"{HEADER}: 2"], "names two data-parallel ranks"),
        (b'{"routed_dp_rank": 1, "data_parallel_rank": 2}', [], "names two data-parallel ranks"),
        (b'{"routed_dp_rank": 1, "routed_dp_rank": 1}', [], "is in the body twice"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/generate"])
async def test_an_invalid_rank_is_rejected_and_reaches_no_engine(path, body, fields, message):
    async with run_with_ranks() as (_, client, recorder):
        response = await ask(client, post(body, *fields, path=path))
        assert response.status == 400
        assert message in response.body.decode()
        assert (await ask(client, post(path=path))).status == 200
    assert len(recorder.heads) == 1


async def test_the_error_for_an_unknown_rank_lists_the_known_ranks():
    async with run_with_ranks(2) as (opened, client, _):
        response = await ask(client, post(CHAT, f"{HEADER}: 2"))
        worker_id = opened.fleet.workers[0].display_id
        assert f"{worker_id}@0, {worker_id}@1" in response.body.decode()


@pytest.mark.parametrize("body", [CHAT, b'{"routed_dp_rank": "any", "routed_dp_rank": 5}'])
async def test_without_ranks_in_the_fleet_the_header_and_the_key_are_unchanged(body):
    async with run_with_ranks(1) as (_, client, recorder):
        for _ in range(3):
            await ask(client, post(body, "X-DATA-Parallel-Rank: abc", path="/generate"))
    assert recorder.ranks() == [["abc"]] * 3
    assert recorder.bodies == [body] * 3


async def test_a_worker_without_ranks_gets_no_header_in_a_fleet_with_ranks():
    recorder, plain = Recorder(), Recorder()
    async with fake_workers(recorder.script, plain.script) as (first, second):
        config = with_ranks(first.url, 2) + f'[[workers]]\nurl = "{second.url}"\n'
        async with run_dataplane(config=config) as opened, opened.client() as client:
            for _ in range(6):
                assert (await ask(client, post(path="/generate"))).status == 200
    assert Counter(map(str, recorder.ranks())) == {"['0']": 2, "['1']": 2}
    assert plain.ranks() == [[], []]
    assert plain.bodies == [CHAT] * 2


async def test_requests_in_flight_are_spread_evenly_and_their_counts_end_at_zero():
    arrived, gate = [], trio.Event()

    async def script(call):
        arrived.append(dict(call.fields)[HEADER])
        await gate.wait()
        await call.send(counted(b"{}"))

    async with fake_workers(script) as (worker,):
        config = with_ranks(worker.url, 4, '[routing]\npolicy = "least_request"')
        async with run_dataplane(config=config) as opened, trio.open_nursery() as nursery:

            async def send_one():
                async with opened.client() as client:
                    assert (await ask(client, post())).status == 200

            for _ in range(12):
                nursery.start_soon(send_one)
            while len(arrived) < 12:
                await trio.sleep(0.01)
            (worker,) = opened.fleet.workers
            assert [rank.in_flight for rank in worker.dp_ranks] == [3, 3, 3, 3]
            assert worker.in_flight == 12
            gate.set()
        assert [rank.in_flight for rank in worker.dp_ranks] == [0] * 4
    assert Counter(arrived) == {"0": 3, "1": 3, "2": 3, "3": 3}


async def test_a_session_stays_at_its_rank():
    more = '[routing]\nsticky_sessions = true\nsession_headers = ["x-session-id"]'
    async with run_with_ranks(4, more) as (opened, client, recorder):
        for session in "abcabcabc":
            assert (await ask(client, post(CHAT, f"x-session-id: {session}"))).status == 200
        assert opened.dataplane.session_count(opened.fleet.workers[0]) == 3
    assert recorder.ranks() == [["0"], ["1"], ["2"]] * 3


@pytest.mark.parametrize("policy", ["cache_aware", "prefix_hash", "consistent_hashing"])
async def test_equal_prompts_go_to_the_same_rank_and_different_ones_to_all(policy):
    more = f'[routing]\npolicy = "{policy}"\nsession_headers = ["x-session-id"]'
    async with run_with_ranks(4, more) as (_, client, recorder):
        for turn in range(2):
            for number in range(24):
                body = json.dumps({"prompt": f"{number} " + f"{number * 37} " * 200}).encode()
                request = post(body, f"x-session-id: {number}", path="/v1/completions")
                assert (await ask(client, request)).status == 200, turn
    ranks = recorder.ranks()
    assert ranks[:24] == ranks[24:]
    assert len(Counter(map(str, ranks))) == 4


async def test_a_cleared_cache_or_a_removed_rank_clears_the_cached_prompts_of_ranks():
    async with run_with_ranks(4, '[routing]\npolicy = "cache_aware"') as (opened, client, recorder):
        (worker,) = opened.fleet.workers

        async def fill():
            for number in range(8):
                body = json.dumps({"prompt": f"{number}" * 300}).encode()
                assert (await ask(client, post(body, path="/v1/completions"))).status == 200
            return opened.dataplane.policy.stats()["tree_size_by_worker"]

        assert sorted(await fill()) == [f"{worker.url}@{rank}" for rank in range(4)]
        opened.fleet.cache_cleared(worker)
        assert not any(opened.dataplane.policy.stats()["tree_size_by_worker"].values())
        await fill()
        config = configured(with_ranks(worker.url, 2), [])
        opened.fleet.apply(desired_workers(config, (), SavedState()), NOW)
        sizes = opened.dataplane.policy.stats()["tree_size_by_worker"]
        assert {url for url, size in sizes.items() if size} == {f"{worker.url}@{n}" for n in (0, 1)}
    assert len(recorder.heads) == 16


async def test_a_change_of_the_ranks_ends_nothing_in_flight():
    gate = trio.Event()

    async def script(call):
        await call.send(CHUNKED_HEAD, chunk(b"first "))
        await gate.wait()
        await call.send(chunk(dict(call.fields).get(HEADER, "none").encode()), LAST_CHUNK)

    async with fake_workers(script) as (fake,):
        async with (
            run_dataplane(config=with_ranks(fake.url, 4)) as opened,
            opened.client() as client,
            opened.client() as other,
        ):
            (worker,) = opened.fleet.workers
            await client.send(post(CHAT, f"{HEADER}: 3"))
            while not worker.in_flight:
                await trio.sleep(0.01)
            last_rank = worker.dp_ranks[3]
            for ranks, count in ((2, 2), (1, 0), (8, 8)):
                config = configured(with_ranks(fake.url, ranks), [])
                opened.fleet.apply(desired_workers(config, (), SavedState()), NOW)
                assert len(worker.dp_ranks) == count
                assert (worker.in_flight, last_rank.in_flight) == (1, 1)
            assert worker.dp_ranks[3] is last_rank
            await other.send(post(CHAT, f"{HEADER}: 7"))
            gate.set()
            assert (await client.answer()).body == b"first 3"
            assert (await other.answer()).body == b"first 7"
        assert (worker.in_flight, last_rank.in_flight) == (0, 0)


async def test_a_kept_alive_connection_follows_changes_of_the_ranks():
    async with run_with_ranks(1) as (opened, client, recorder):
        url = opened.fleet.workers[0].url
        for ranks in (1, 4, 1, 3):
            config = configured(with_ranks(url, ranks), [])
            opened.fleet.apply(desired_workers(config, (), SavedState()), NOW)
            cache = opened.dataplane.settings.fast_path_cache
            assert cache.has_ranks == opened.fleet.has_ranks == (ranks > 1)
            for _ in range(3):
                assert (await ask(client, post(path="/generate"))).status == 200
                pinned = await ask(client, post(b'{"routed_dp_rank": 0}', path="/generate"))
                assert pinned.status == 200
    requested = [[["0"]] if ranks > 1 else [[]] for ranks in (1, 4, 1, 3)]
    received = [recorder.ranks()[start + 1 : start + 6 : 2] for start in range(0, 24, 6)]
    assert received == [ranks * 3 for ranks in requested]
    chosen = [
        [int(ranks[0]) for ranks in recorder.ranks()[start : start + 6 : 2] if ranks]
        for start in (6, 18)
    ]
    assert all(len(set(ranks)) > 1 for ranks in chosen)
    assert recorder.bodies[1::2] == [b'{"routed_dp_rank": 0}'] * 12


async def test_a_failed_attempt_at_a_rank_is_retried_and_counted_for_its_worker():
    async def failing(call):
        call.reset()

    ok = Recorder()
    async with fake_workers(failing, ok.script) as (first, second):
        config = with_ranks(first.url, 2) + with_ranks(second.url, 2)
        async with run_dataplane(config=config) as opened, opened.client() as client:
            response = await ask(client, post())
            assert response.status == 200
            bad, good = opened.fleet.workers
            assert opened.failures() == [1, 0]
            assert response.one("x-omni-attempts") == (
                f"{bad.display_id}@0=reset_before_response, {good.display_id}@1=200"
            )
            assert [rank.in_flight for rank in (*bad.dp_ranks, *good.dp_ranks)] == [0] * 4
            assert (bad.failed, good.succeeded) == ({"generation": 1}, {"generation": 1})
            assert bad.dp_ranks[0].failed == {"generation": 1}
            assert opened.last["rank"] == 1
            tried = [attempt["worker"] for attempt in opened.last["tried"]]
            assert tried == [f"{bad.url}@0", f"{good.url}@1"]


async def test_the_workers_own_key_is_sent_to_each_of_its_ranks(monkeypatch):
    monkeypatch.setenv("RANK_KEY", "secret")
    recorder = Recorder()
    async with fake_workers(recorder.script) as (worker,):
        config = with_ranks(worker.url, 2) + 'api_key_env = "RANK_KEY"\n'
        async with run_dataplane(config=config) as opened, opened.client() as client:
            for _ in range(4):
                assert (await ask(client, post(path="/generate"))).status == 200
    assert recorder.ranks() == [["0"], ["1"], ["0"], ["1"]]
    assert {dict(head)["authorization"] for head in recorder.heads} == {"Bearer secret"}
    assert [json.loads(body)["routed_dp_rank"] for body in recorder.bodies] == [0, 1, 0, 1]


async def test_limits_of_ranks_queue_requests_until_a_rank_has_capacity():
    gates, arrived = {}, []

    async def script(call):
        rank = dict(call.fields)[HEADER]
        arrived.append(rank)
        await gates.setdefault(len(arrived), trio.Event()).wait()
        await call.send(counted(rank.encode()))

    async with fake_workers(script) as (fake,):
        config = with_ranks(fake.url, 2, "[server]\nqueue_size = 10") + "max_inflight = 2\n"
        async with run_dataplane(config=config) as opened, trio.open_nursery() as nursery:
            bodies = []

            async def send_one():
                async with opened.client() as client:
                    bodies.append((await ask(client, post())).body)

            for _ in range(3):
                nursery.start_soon(send_one)
            while len(arrived) < 2 or not opened.dataplane.queue.waiting:
                await trio.sleep(0.01)
            assert sorted(arrived) == ["0", "1"]
            gates[2].set()
            while len(arrived) < 3:
                await trio.sleep(0.01)
            assert arrived[2] == arrived[1]
            for number in (1, 3):
                gates.setdefault(number, trio.Event()).set()
        assert len(bodies) == 3


@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions"])
async def test_responses_of_the_engine_are_unchanged(path):
    reply = counted(b'{"routed_dp_rank": 1}', "x-data-parallel-rank: 5")
    async with (
        fake_workers(answering(reply)) as (fake,),
        run_dataplane(config=with_ranks(fake.url, 2)) as opened,
        opened.client() as client,
    ):
        for _ in range(3):
            response = await ask(client, post(path=path))
            assert response.body == b'{"routed_dp_rank": 1}'
            assert response.one("x-data-parallel-rank") == "5"
