"""How the weights, labels and caches of participants decide which of them are uncertain."""

import pytest
import trio

from tests.admin_api.api_fixture import A, B
from tests.weight_sync.operation_fixture import admin_call, cordon_reasons_of
from tests.weight_sync.trainer_fixture import (
    BUCKETS,
    COMPLETE,
    CONTINUE,
    DESTROY,
    DISK,
    PREPARE,
    TENSORS,
    UPDATE,
    SyncEngines,
    uncertain_workers,
    versions_by_url,
)

pytestmark = pytest.mark.usefixtures("listening")
ENGINES = SyncEngines
FLUSH = "/flush_cache"
STALE = {"success": False, "message": "Weights were updated, but the cache was not flushed"}
DAMAGED = {"success": False, "detail": {"message": "The weights are damaged: update them"}}


@pytest.fixture
def forgotten(trainer):
    urls = []
    trainer.api.fleet.watch_cache_cleared(lambda worker: urls.append(worker.url))
    return urls


# Refusals that report changed weights


@pytest.mark.parametrize("refusal", [STALE, DAMAGED])
async def test_a_refusal_that_reports_changed_weights_leaves_the_worker_uncertain(
    trainer, engines, refusal
):
    await trainer.arm()
    for url in (A, B):
        engines.set_reply(url, COMPLETE, refusal, 400)
    response = await trainer.ask(COMPLETE, weight_version="v2")
    assert response.status in (400, 502)
    assert uncertain_workers(trainer.api) == [A, B]
    await trainer.until("idle")
    assert cordon_reasons_of(trainer.api) == [["uncertain"], ["uncertain"]]


async def test_a_worker_with_new_weights_and_an_old_cache_is_uncertain_until_a_flush(
    trainer, engines
):
    await trainer.arm()
    engines.set_reply(B, COMPLETE, STALE, 400)
    engines.labels[B] = "v2"  # it has the new weights
    engines.set_reply(B, FLUSH, {"success": False}, 400)
    response = await trainer.ask(COMPLETE, weight_version="v2")
    assert response.status == 400
    assert "the cache was not flushed" in response.body["message"]
    assert versions_by_url(trainer.api)[A] == ("v2", 1)
    await trainer.until("idle")
    with trio.fail_after(5):
        while FLUSH not in engines.paths(B):  # noqa: ASYNC110  # nothing signals it
            await trio.sleep(0.01)
    assert cordon_reasons_of(trainer.api) == [[], ["uncertain"]]
    del engines.replies[B, FLUSH]
    assert (await trainer.api.operations.submit(admin_call(FLUSH))).ok
    with trio.fail_after(5):
        while uncertain_workers(trainer.api):  # noqa: ASYNC110  # nothing signals it
            await trio.sleep(0.01)
    assert cordon_reasons_of(trainer.api) == [[], []]


async def test_a_disk_load_without_a_flush_leaves_the_worker_uncertain(trainer, engines):
    for url in (A, B):
        engines.set_reply(url, DISK, STALE, 400)
    assert not (await trainer.ask(DISK, model_path="m")).ok
    assert uncertain_workers(trainer.api) == [A, B]


# Labels


async def test_a_worker_with_another_label_than_the_others_is_uncertain(trainer, engines):
    await trainer.arm()

    async def respond(request, url, path, original=engines.respond):
        response = await original(request, url, path)
        engines.labels[B] = "v0"
        return response

    engines.respond = respond
    response = await trainer.ask(COMPLETE, weight_version="v2")
    assert response.status == 502
    assert "it reports the label 'v0', other workers report 'v2'" in response.body["uncertain"][B]
    assert uncertain_workers(trainer.api) == [B]
    assert (response.body["weight_version"], versions_by_url(trainer.api)[A]) == ("v2", ("v2", 1))


@pytest.mark.parametrize("label", ["v0", None])
async def test_engines_that_ignore_labels_are_not_uncertain(trainer, engines, label):
    await trainer.arm()

    async def respond(request, url, path, original=engines.respond):
        response = await original(request, url, path)
        engines.labels.update({A: "v0", B: label})
        return response

    engines.respond = respond
    assert (await trainer.ask(COMPLETE, weight_version="v2")).ok
    assert uncertain_workers(trainer.api) == []


async def test_a_repeated_label_is_a_new_epoch(trainer):
    await trainer.arm()
    for epoch in (1, 2):
        body = await trainer.expect_ok(COMPLETE, weight_version="v2", epoch=epoch)
        assert (body["weight_epoch"], body["weight_version"]) == (epoch, "v2")
        assert set(versions_by_url(trainer.api).values()) == {("v2", epoch)}
        await trainer.expect_ok(PREPARE, **BUCKETS)


# Caches


async def test_cache_knowledge_is_cleared_only_where_caches_were_flushed(trainer, forgotten):
    await trainer.arm()
    await trainer.expect_ok(COMPLETE, weight_version="v2", flush_cache=True)
    assert sorted(forgotten) == [A, B]
    forgotten.clear()
    for body in ({"flush_cache": False}, {}):  # a complete flushes only with flush_cache
        await trainer.expect_ok(PREPARE, **BUCKETS)
        await trainer.expect_ok(COMPLETE, weight_version="v3", **body)
        assert forgotten == []
    await trainer.expect_ok(UPDATE, **TENSORS, weight_version="v4", flush_cache=False)
    await trainer.expect_ok(CONTINUE)
    assert forgotten == []
    # A one-phase update flushes unless flush_cache is false.
    await trainer.expect_ok(UPDATE, **TENSORS, weight_version="v5")
    await trainer.expect_ok(DESTROY)
    assert sorted(forgotten) == [A, B]


# Continue


async def test_continue_names_uncertain_workers_and_keeps_them_cordoned(trainer, engines):
    engines.sums[B] = "other"
    await trainer.arm()
    assert not (await trainer.ask(COMPLETE, weight_version="v2")).ok
    for _ in range(2):
        body = await trainer.expect_ok(CONTINUE)
        assert sorted(body["uncertain"]) == [A, B]
        assert cordon_reasons_of(trainer.api) == [["uncertain"], ["uncertain"]]
    assert "uncertain" not in (await trainer.api.operations.submit(admin_call("/model_info"))).body
