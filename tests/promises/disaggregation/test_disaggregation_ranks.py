"""Prefill and decode workers with data-parallel ranks: each leg names its rank, per protocol."""

import json
from contextlib import asynccontextmanager

import pytest

from tests.promises.support import disaggregated_engines
from tests.promises.support.clients import post
from tests.promises.support.disaggregated_engines import eventually, fleet_of, worker_entry

HEADER = "x-data-parallel-rank"
ADDED_KEYS = ("bootstrap_host", "bootstrap_port", "bootstrap_room", "rid", "disagg_prefill_dp_rank")


@asynccontextmanager
async def ranked_fleet(monkeypatch, connector, prefill=2, decode=3, *, more="", config=""):
    """One worker of each role with these numbers of ranks; `more` is added to both entries."""

    def entry(engine, url=""):
        ranks = prefill if engine.role == "prefill" else decode
        return f"{worker_entry(engine, url)}ranks = {ranks}\n{more}\n"

    monkeypatch.setattr(disaggregated_engines, "worker_entry", entry)
    async with fleet_of(connector, config=config) as (fleet, client):
        yield fleet, client


async def ask(client, body, *fields, path="/v1/chat/completions"):
    await client.send(post(json.dumps(body).encode(), *fields, path=path))
    return await client.answer()


def ranks(engine):
    return [head.get(HEADER) for head in engine.heads]


def none_held(fleet):
    workers = fleet.before.fleet.workers
    return not any(part.in_flight for worker in workers for part in (worker, *worker.dp_ranks))


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/generate"])
async def test_both_engines_get_their_rank_and_decode_also_that_of_prefill(monkeypatch, path):
    async with ranked_fleet(monkeypatch, "sglang") as (fleet, client):
        for _ in range(6):
            body = {"text": "a", "messages": []}
            assert (await ask(client, body, path=path)).status == 200
        (prefill,), (decode,) = fleet.prefills, fleet.decodes
        assert ranks(prefill) == ["0", "1"] * 3
        assert ranks(decode) == ["0", "1", "2"] * 2
        prefill_ranks = [body["disagg_prefill_dp_rank"] for body in decode.bodies]
        assert prefill_ranks == [int(rank) for rank in ranks(prefill)]
        for engine in (prefill, decode):
            in_body = [body.get("routed_dp_rank") for body in engine.bodies]
            in_header = [int(rank) for rank in ranks(engine)]
            assert in_body == (in_header if path == "/generate" else [None] * 6)
            for raw in engine.raw:
                assert raw.count(b'"routed_dp_rank"') == (path == "/generate")
        rest = [{k: v for k, v in body.items() if k not in ADDED_KEYS} for body in prefill.bodies]
        for body in rest:
            body.pop("routed_dp_rank", None)
        assert rest == [{"text": "a", "messages": []}] * 6
        workers = fleet.before.fleet.workers
        assert [[sum(r.succeeded.values()) for r in worker.dp_ranks] for worker in workers] == [
            [3, 3], [2, 2, 2],
        ]  # fmt: skip
        await eventually(lambda: none_held(fleet))


@pytest.mark.parametrize("size", [10, 2_000_000])
@pytest.mark.parametrize("by", ["header", "routed_dp_rank", "data_parallel_rank"])
@pytest.mark.parametrize("prefill", [1, 2])
async def test_a_rank_that_the_client_names_is_used_for_decode(monkeypatch, by, prefill, size):
    async with ranked_fleet(monkeypatch, "sglang", prefill=prefill) as (fleet, client):
        fields = [f"{HEADER}: 2"] if by == "header" else []
        body = {"text": "a" * size} | ({} if by == "header" else {by: 2})
        for _ in range(2):
            assert (await ask(client, body, *fields, path="/generate")).status == 200
        prefill_engine, decode_engine = fleet.prefills[0], fleet.decodes[0]
        assert ranks(decode_engine) == ["2", "2"]
        key = "routed_dp_rank" if by == "header" else by
        assert [body[key] for body in decode_engine.bodies] == [2, 2]
        assert ranks(prefill_engine) == (["0", "1"] if prefill == 2 else [None, None])
        own = [body.get("routed_dp_rank") for body in prefill_engine.bodies]
        assert own == ([0, 1] if prefill == 2 else [None, None])
        assert not any("data_parallel_rank" in body for body in prefill_engine.bodies)
        named = [body.get("disagg_prefill_dp_rank") for body in decode_engine.bodies]
        assert named == own
        for raw in (*prefill_engine.raw, *decode_engine.raw):
            assert raw.count(b"_dp_rank") == raw.count(b'"routed_dp_rank"') + (
                b'"disagg_prefill_dp_rank"' in raw
            )
            assert raw.count(b'"routed_dp_rank"') <= 1


async def test_a_rank_that_no_decode_worker_has_is_refused(monkeypatch):
    async with ranked_fleet(monkeypatch, "sglang", prefill=8, decode=2) as (fleet, client):
        answer = await ask(client, {"text": "a"}, f"{HEADER}: 5", path="/generate")
        assert answer.status == 400
        assert b"invalid_rank" in answer.body
        assert not fleet.prefills[0].bodies
        await eventually(lambda: none_held(fleet))


async def test_a_duplicate_key_that_only_decode_gets_is_refused(monkeypatch):
    async with ranked_fleet(monkeypatch, "sglang") as (fleet, client):
        duplicate = b'{"text": "a", "disagg_prefill_dp_rank": 1, "disagg_prefill_dp_rank": 2}'
        await client.send(post(duplicate, path="/generate"))
        answer = await client.answer()
        assert (answer.status, json.loads(answer.body)["error"]["code"]) == (400, "duplicate_key")
        assert not fleet.prefills[0].bodies
        assert not fleet.decodes[0].bodies
        await eventually(lambda: none_held(fleet))


async def test_vllm_engines_get_their_ranks_by_header(monkeypatch):
    async with ranked_fleet(monkeypatch, "nixl") as (fleet, client):
        for _ in range(6):
            assert (await ask(client, {"messages": []})).status == 200
        assert ranks(fleet.prefills[0]) == ["0", "1"] * 3
        assert ranks(fleet.decodes[0]) == ["0", "1", "2"] * 2
        bodies = (*fleet.prefills[0].raw, *fleet.decodes[0].raw)
        assert not any(b"dp_rank" in raw for raw in bodies)
        await eventually(lambda: none_held(fleet))


async def test_a_mooncake_decode_engine_gets_the_engine_id_of_the_prefill_rank(monkeypatch):
    async with ranked_fleet(monkeypatch, "mooncake") as (fleet, client):
        (prefill,), (decode,) = fleet.prefills, fleet.decodes
        prefill.engine_ids = ["engine-a", "engine-b"]
        for _ in range(4):
            assert (await ask(client, {"messages": []})).status == 200
        assert ranks(prefill) == ["0", "1"] * 2
        engine_ids = [body["kv_transfer_params"]["remote_engine_id"] for body in decode.bodies]
        assert engine_ids == ["engine-a", "engine-b"] * 2
        assert prefill.queries == 1
        await eventually(lambda: none_held(fleet))


async def test_a_rank_without_an_engine_id_makes_the_proxy_query_again(monkeypatch):
    async with ranked_fleet(monkeypatch, "mooncake") as (fleet, client):
        prefill = fleet.prefills[0]
        prefill.engine_ids = ["engine-a"]
        statuses = [(await ask(client, {"messages": []})).status for _ in range(2)]
        assert statuses == [200, 200]
        assert prefill.queries >= 2
        await eventually(lambda: none_held(fleet))


@pytest.mark.parametrize("connector", ["sglang", "nixl"])
async def test_the_model_of_an_alias_is_replaced_once_in_each_leg(monkeypatch, connector):
    config = '[[routing.models]]\nname = "a"\ntargets = [{ model = "a-long-name" }]\n'
    async with ranked_fleet(
        monkeypatch, connector, more='model = "a-long-name"', config=config
    ) as (
        fleet,
        client,
    ):
        body = {"x": 1, "model": "a", "messages": []}
        for _ in range(2):
            assert (await ask(client, body)).status == 200
        for engine in (fleet.prefills[0], fleet.decodes[0]):
            assert [body["model"] for body in engine.bodies] == ["a-long-name"] * 2
            assert all(
                b'"x": 1, "model": "a-long-name", "messages": []' in raw for raw in engine.raw
            )
        await eventually(lambda: none_held(fleet))
