"""The proxy learns from the cache reports in responses, and relays these unchanged."""

import json
from contextlib import suppress

import pytest

from omni_proxy.routing.cache_prediction import note_first_byte
from omni_proxy.telemetry.metrics import Metrics
from omni_proxy.telemetry.recent_window import RecentWindow
from tests.promises.support.clients import Truncated, post
from tests.promises.support.dataplane_fixture import run_dataplane
from tests.promises.support.disaggregated_engines import fleet_of
from tests.promises.support.fakes import LAST_CHUNK, SSE_HEAD, chunk, counted, fake_workers
from tests.routing.policies.chats import chat

CONFIG = '[routing]\npolicy = "cache_aware"\n'
SHARED = "You answer questions about a harbour town. " * 40


def ask(end, *, stream=False):
    messages = [{"role": "user", "content": SHARED + end * 1000}]
    return post(json.dumps({"messages": messages, "stream": stream}).encode())


def usage(cached):
    details = {"cached_tokens": cached}
    return {"usage": {"prompt_tokens": 1000, "prompt_tokens_details": details}}


def whole(body):
    return [counted(body)]


def streamed(body):
    event = b"data: " + body + b"\n\n"
    return [SSE_HEAD, chunk(b"data: {}\n\n"), chunk(event), chunk(b"data: [DONE]\n\n"), LAST_CHUNK]


def streamed_at_once(body):
    return [b"".join(streamed(body))]


@pytest.mark.parametrize("form", [whole, streamed, streamed_at_once])
async def test_an_eviction_is_learned_from_the_usage_in_a_response(form):
    cached_tokens = [500, 0, 0]
    bodies = []

    async def answering_with_usage(call):
        bodies.append(json.dumps(usage(cached_tokens.pop(0))).encode())
        for piece in form(bodies[-1]):
            await call.send(piece)

    async with (
        fake_workers(answering_with_usage) as fakes,
        run_dataplane(*fakes, config=CONFIG) as opened,
    ):
        meters = opened.dataplane.recorders.meters = Metrics(opened.fleet, RecentWindow())
        async with opened.client() as client:
            for end in "abc":
                await client.send(ask(end, stream=form is not whole))
                with suppress(Truncated):
                    answer = await client.answer()
                    assert bodies[-1] in answer.body
        (worker,) = opened.fleet.workers
        predicted, cached = meters.cached_tokens[worker]
        assert cached == 500
        assert 1100 < predicted < 1400  # the shared part of the second and the third prompt
        assert opened.dataplane.policy.stats()["corrections"] == 2
        assert not any(cell.tokens for cell in meters.series.values())


def reports_of(policy, worker):
    """What responses of the worker have reported. A prediction has it, here that of a prompt that
    is not sent and counts as answered at once."""
    request = chat("not sent")
    policy.pick([worker], request)
    note_first_byte(request.prediction)
    return request.prediction.reports


@pytest.mark.parametrize("answer", [counted(b'{"usage":{"prompt_tokens":9}}'),
                                    counted(b"no", status="404 No"), None])  # fmt: skip
async def test_a_response_without_a_report_ends_its_prediction_and_changes_nothing(answer):
    async def script(call):
        if answer is not None:
            await call.send(answer)
        call.close()

    config = CONFIG + "max_total_retries = 1\n"
    async with fake_workers(script) as fakes, run_dataplane(*fakes, config=config) as opened:
        async with opened.client() as client:
            await client.send(ask("a"))
            with suppress(Truncated):
                await client.answer()
        reports = reports_of(opened.dataplane.policy, opened.fleet.workers[0])
        assert reports.oldest_pending(77) == 77
        assert (reports.answers, reports.backlog) == (0, 0)


async def test_a_reload_turns_feedback_off():
    async def answering_with_usage(call):
        await call.send(counted(json.dumps(usage(0)).encode()))

    async with (
        fake_workers(answering_with_usage) as fakes,
        run_dataplane(*fakes, config=CONFIG) as opened,
    ):
        async with opened.client() as client:
            await client.send(ask("a"))
            await client.answer()
            reports = reports_of(opened.dataplane.policy, opened.fleet.workers[0])
            assert reports.answers == 1
            opened.reload(CONFIG + "[routing.cache_aware]\nfeedback = false\n")
            await client.send(ask("b"))
            await client.answer()
            assert reports.answers == 1
        assert not opened.dataplane.settings.keeps_last_chunk


REPORTS = {
    # By connector: the usage that is reported, and the role of the engine whose report counts.
    "sglang": ({"prompt_tokens": 1000, "cached_tokens": 700}, "decode"),
    "nixl": ({"prompt_tokens": 1000, "prompt_tokens_details": {"cached_tokens": 700}}, "prefill"),
}


@pytest.mark.parametrize("connector", REPORTS)
async def test_the_prefill_workers_cache_is_learned_from_the_leg_that_reports_it(connector):
    usage, reporter = REPORTS[connector]
    async with fleet_of(connector, config=CONFIG) as (fleet, client):
        engines = fleet.prefills if reporter == "prefill" else fleet.decodes
        engines[0].usage = usage
        if connector == "nixl":  # its decode engine counts all transferred tokens as cached
            fleet.decodes[0].usage = usage | {"prompt_tokens_details": {"cached_tokens": 999}}
        path = "/generate" if connector == "sglang" else "/v1/completions"
        body = {"text": SHARED} if connector == "sglang" else {"prompt": SHARED}
        for _ in range(2):
            await client.send(post(json.dumps(body).encode(), path=path))
            assert (await client.answer()).status == 200
        pools = fleet.before.dataplane.balancer.pool_policies
        prefill, decode = sorted(fleet.before.fleet.workers, key=lambda each: each.role)[::-1]
        reports = reports_of(pools.of("prefill"), prefill)
        assert (reports.answers, reports.reported) == (2, 1400)
        unread = reports_of(pools.of("decode"), decode)
        assert (unread.answers, unread.silent) == (0, 0)
        assert all(prediction.answered for prediction in (*reports.unanswered, *unread.unanswered))


async def test_a_decode_worker_that_computes_the_prompt_reports_its_own_cache():
    async with fleet_of("nixl", prefills=0, config=CONFIG) as (fleet, client):
        fleet.decodes[0].usage, _ = REPORTS["nixl"]
        await client.send(post(json.dumps({"prompt": SHARED}).encode(), path="/v1/completions"))
        assert (await client.answer()).status == 200
        (decode,) = fleet.before.fleet.workers
        reports = reports_of(fleet.before.dataplane.balancer.pool_policies.of("decode"), decode)
        assert (reports.answers, reports.reported) == (1, 700)
