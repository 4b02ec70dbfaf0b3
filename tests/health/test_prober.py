import httpx
import pytest
import trio
import trio.lowlevel
import trio.testing

from omni_proxy.fleet.health import Thresholds
from omni_proxy.fleet.worker import LAUNCH_CORDON
from omni_proxy.health import prober as probing
from omni_proxy.health.prober import Prober
from tests.health.prober_world import NOW, URL


async def running(world, nursery):
    await nursery.start(world.prober.run)


async def test_a_worker_is_probed_at_once_again_soon_while_rising_then_each_interval(
    world, asked, nursery, autojump_clock
):
    worker = world.add(URL)
    await running(world, nursery)
    await trio.sleep(21)
    start = asked[0][0]
    assert [round(at - start, 3) for at, _ in asked] == [0, 0.5, 10.5, 20.5]
    assert worker.health.state == "healthy"


@pytest.mark.parametrize(("chance", "pause_secs"), [(0.0, 8), (0.5, 10), (1.0, 12)])
async def test_intervals_are_jittered_by_a_fifth(
    asked, nursery, autojump_clock, world, chance, pause_secs
):
    world.prober = Prober(world.fleet, world.config_store, jitter=lambda: chance)
    world.fleet.thresholds = Thresholds(rise=1)
    world.add(URL)
    await running(world, nursery)
    await trio.sleep(15)
    assert round(asked[1][0] - asked[0][0], 3) == pause_secs


async def test_a_failing_worker_waits_for_its_interval(world, asked, nursery, autojump_clock):
    asked.reply = lambda request: httpx.Response(500)
    worker = world.add(URL)
    await running(world, nursery)
    await trio.sleep(25)
    assert len(asked) == 3
    assert worker.health.state == "unhealthy"


async def test_a_worker_that_comes_up_long_after_the_threshold_is_taken_by_itself(
    world, asked, nursery, autojump_clock
):
    asked.reply = lambda request: httpx.Response(503)
    worker = world.add(URL)
    await running(world, nursery)
    await trio.sleep(300)
    assert worker.health.state == "unhealthy"
    asked.reply = lambda request: httpx.Response(200)
    await trio.sleep(15)
    assert worker.health.state == "healthy"


async def test_a_worker_that_is_not_up_is_told_at_its_first_failed_probe_and_once(
    world, asked, nursery, autojump_clock, caplog
):
    asked.reply = lambda request: httpx.Response(503, text="loading")
    world.add(URL)
    await running(world, nursery)
    await trio.sleep(1)
    told = [record.getMessage() for record in caplog.records if "not up yet" in record.message]
    assert told == [f"Worker {URL} is not up yet: loading; it is asked again every 10 s"]
    await trio.sleep(100)
    assert sum("not up yet" in record.message for record in caplog.records) == 1


async def test_who_launches_a_worker_tells_itself_that_it_is_not_up(
    world, asked, nursery, autojump_clock, caplog
):
    asked.reply = lambda request: httpx.Response(503)
    world.fleet.cordon(world.add(URL), LAUNCH_CORDON)
    await running(world, nursery)
    await trio.sleep(1)
    assert not any("not up yet" in record.message for record in caplog.records)


async def test_a_dead_worker_is_not_probed_until_it_is_revived(
    world, asked, nursery, autojump_clock
):
    worker = world.add(URL)
    await running(world, nursery)
    await trio.sleep(1)
    world.fleet.mark_dead(worker, NOW)
    before = len(asked)
    await trio.sleep(100)
    assert len(asked) == before
    assert asked.closed == 1
    world.fleet.revive(worker, NOW)
    await trio.sleep(1)
    assert len(asked) == before + 2
    assert worker.health.state == "healthy"


async def test_the_result_of_a_probe_begun_before_a_revival_is_void(
    world, asked, nursery, autojump_clock
):
    async def slowly():
        await trio.sleep(2)
        return httpx.Response(500)

    asked.reply = lambda request: slowly()
    worker = world.add(URL)
    await running(world, nursery)
    await trio.sleep(1)
    world.fleet.revive(worker, NOW)
    await trio.sleep(1.5)
    assert worker.health.consecutive_failures == 0


async def test_workers_that_come_and_go_are_followed(world, asked, nursery, autojump_clock):
    await running(world, nursery)
    world.add(URL)
    await trio.sleep(0.1)
    assert len(asked) == 1
    world.remove(URL)
    await trio.sleep(100)
    assert (len(asked), asked.closed) == (1, 1)
    world.add(URL)
    await trio.sleep(0.1)
    assert len(asked) == 2


async def test_a_slow_worker_delays_nobody_else(world, asked, nursery, autojump_clock):
    async def never():
        await trio.sleep_forever()

    asked.reply = lambda r: never() if r.url.host == "127.0.0.2" else httpx.Response(200)
    slow = world.add(URL, "http://127.0.0.2:1")
    await running(world, nursery)
    await trio.sleep(11)
    assert [host for _, host in asked].count("127.0.0.1") == 3
    assert slow.health.last_error == "no answer within 5 s"


async def test_so_many_workers_are_probed_at_a_time_and_waiting_for_that_is_not_their_fault(
    world, asked, nursery, autojump_clock, monkeypatch
):
    monkeypatch.setattr(probing, "PROBES_AT_ONCE", 4)
    world.prober = probing.Prober(world.fleet, world.config_store, jitter=lambda: 0.5)
    under_way, most = 0, 0

    async def slow(request):
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await trio.sleep(4)
        under_way -= 1
        return httpx.Response(200)

    asked.reply = slow
    world.fleet.thresholds = Thresholds(rise=1, fall=1)
    world.configure(timeout_secs=5, interval_secs=600)
    world.add(*(f"http://127.0.0.{at}:1" for at in range(1, 21)))
    await running(world, nursery)
    await trio.sleep(30)
    assert most == 4
    assert {worker.health.state for worker in world.fleet.workers} == {"healthy"}


async def test_after_a_timeout_the_client_is_a_new_one(world, asked, nursery, autojump_clock):
    async def never():
        await trio.sleep_forever()

    asked.reply = lambda request: never()
    world.add(URL)
    await running(world, nursery)
    await trio.sleep(6)
    assert asked.closed == 1


async def test_a_shorter_interval_counts_at_once(world, asked, nursery, autojump_clock):
    world.configure(interval_secs=1000)
    world.add(URL)
    await running(world, nursery)
    await trio.sleep(100)
    assert len(asked) == 2
    world.configure(interval_secs=10)
    await trio.sleep(11)
    assert len(asked) == 4


async def test_another_endpoint_counts_at_once(world, asked, nursery, autojump_clock):
    paths = []
    asked.reply = lambda r: paths.append(r.url.raw_path) or httpx.Response(200)
    world.add(URL)
    await running(world, nursery)
    await trio.sleep(1)
    world.configure(endpoint="/ready now/ü")
    await trio.sleep(1)
    assert paths[-1] == b"/ready%20now/%C3%BC"


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (500, b"", "status=500"), (503, b"  \n", "status=503"), (500, b"CUDA error", "CUDA error"),
        (301, b"", "status=301"), (404, b"x" * 600, "x" * 512), (500, b"\xff", "\ufffd"),
    ],
)  # fmt: skip
async def test_a_failure_is_told_in_the_workers_words(
    world, asked, nursery, autojump_clock, status, body, said
):
    asked.reply = lambda request: httpx.Response(status, content=body)
    worker = world.add(URL)
    await running(world, nursery)
    await trio.sleep(0.1)
    assert worker.health.last_error == said
    assert worker.health.last_status_code == status


@pytest.mark.parametrize("status", [200, 204, 299])
async def test_every_2xx_is_good(world, asked, nursery, autojump_clock, status):
    asked.reply = lambda request: httpx.Response(status)
    worker = world.add(URL)
    await running(world, nursery)
    await trio.sleep(0.1)
    assert worker.health.last_error is None


@pytest.mark.parametrize(
    ("body", "kept"),
    [
        (b'{"version": 3}', {"version": 3}), (b"", None), (b"ok", None), (b"[" * 60000, None),
        (b'"' + b"x" * 70000 + b'"', None),
    ],
)  # fmt: skip
async def test_the_health_body_is_kept_when_it_is_small_json(
    world, asked, nursery, autojump_clock, body, kept
):
    asked.reply = lambda request: httpx.Response(200, content=body)
    worker = world.add(URL)
    await running(world, nursery)
    await trio.sleep(0.1)
    assert worker.health_body == kept
    assert worker.health.last_error is None


async def test_a_new_workers_one_probe_serves_whoever_waits_for_it(
    world, asked, nursery, autojump_clock
):
    world.configure(success_threshold=2)
    await running(world, nursery)
    worker = world.add(URL)
    await world.prober.probe_once(worker)
    assert len(asked) == 1
    assert worker.health.consecutive_successes == 1


async def test_a_living_worker_can_be_probed_at_any_time(world, asked, nursery, autojump_clock):
    worker = world.add(URL)
    await running(world, nursery)
    await trio.sleep(2)
    before = len(asked)
    await world.prober.probe_once(worker)
    assert len(asked) == before + 1


async def test_a_revived_worker_is_probed_under_its_new_epoch(
    world, asked, nursery, autojump_clock
):
    worker = world.add(URL)
    await running(world, nursery)
    await trio.sleep(1)
    world.fleet.mark_dead(worker, NOW)
    world.fleet.revive(worker, NOW)
    await world.prober.probe_once(worker)
    assert worker.health.consecutive_successes == 1


async def test_a_probe_that_a_revival_voided_is_not_waited_for_alone(
    world, asked, nursery, autojump_clock
):
    replies = iter([500, 200, 200])

    async def slowly():
        await trio.sleep(2)
        return httpx.Response(next(replies))

    asked.reply = lambda request: slowly()
    worker = world.add(URL)
    await running(world, nursery)
    await trio.sleep(1)
    world.fleet.revive(worker, NOW)
    await world.prober.probe_once(worker)
    assert (worker.health.consecutive_successes, worker.health.last_status_code) == (1, 200)


async def test_waiting_for_a_probe_ends_when_the_worker_goes(world, asked, nursery, autojump_clock):
    async def never():
        await trio.sleep_forever()

    asked.reply = lambda request: never()
    worker = world.add(URL)
    await running(world, nursery)
    nursery.start_soon(world.prober.probe_once, worker)
    await trio.testing.wait_all_tasks_blocked()
    world.remove(URL)
    with trio.fail_after(30):
        await world.prober.probe_once(worker)


async def test_without_a_running_prober_nobody_waits(world, asked):
    worker = world.add(URL)
    with trio.fail_after(30):
        await world.prober.probe_once(worker)
    assert asked == []


@pytest.mark.parametrize("prober", ["running", "stopped"])
async def test_waiting_for_a_worker_that_is_not_probed_lets_others_run_and_can_be_cancelled(
    world, asked, nursery, prober
):
    worker = world.add(URL)
    if prober == "running":
        await running(world, nursery)
        world.fleet.mark_dead(worker, NOW)
    with trio.testing.assert_checkpoints():
        await world.prober.probe_once(worker)


async def test_it_may_be_started_again_after_an_end(world, asked, autojump_clock):
    world.add(URL)
    for expected in (1, 2):
        async with trio.open_nursery() as nursery:
            await nursery.start(world.prober.run)
            await trio.sleep(0.1)
            nursery.cancel_scope.cancel()
        assert (len(asked), asked.closed) == (expected, expected)


async def test_an_ejected_worker_is_probed_at_once(world, asked, nursery, autojump_clock):
    worker = world.add(URL)
    await running(world, nursery)
    await trio.sleep(3)
    probes = len(asked)
    for _ in range(3):
        world.fleet.observe_request_failure(worker, status=502, error="bad gateway", at=NOW)
    await trio.lowlevel.checkpoint()
    assert worker.health.state == "unhealthy"
    await trio.sleep(1)
    assert len(asked) == probes + 2
    assert (worker.health.state, worker.health.is_half_open) == ("healthy", True)
