import httpx
import pytest
import trio
import trio.lowlevel
import trio.testing

from omni_proxy.fleet.cordon_reasons import LAUNCH_CORDON
from omni_proxy.fleet.health_state import Thresholds
from omni_proxy.health.prober import Prober
from tests.health.prober_fixture import NOW, URL


async def start_prober(health, nursery):
    await nursery.start(health.prober.run)


async def test_a_worker_is_probed_at_once_then_soon_then_each_interval(
    health, probes, nursery, autojump_clock
):
    worker = health.add(URL)
    await start_prober(health, nursery)
    await trio.sleep(21)
    start = probes[0][0]
    assert [round(at - start, 3) for at, _ in probes] == [0, 0.5, 10.5, 20.5]
    assert worker.health.state == "healthy"


@pytest.mark.parametrize(("chance", "pause_secs"), [(0.0, 8), (0.5, 10), (1.0, 12)])
async def test_intervals_are_jittered_by_a_fifth(
    probes, nursery, autojump_clock, health, chance, pause_secs
):
    health.prober = Prober(health.fleet, health.config_store, jitter=lambda: chance)
    health.fleet.thresholds = Thresholds(rise=1)
    health.add(URL)
    await start_prober(health, nursery)
    await trio.sleep(15)
    assert round(probes[1][0] - probes[0][0], 3) == pause_secs


async def test_a_failing_worker_is_probed_each_interval(health, probes, nursery, autojump_clock):
    probes.reply = lambda request: httpx.Response(500)
    worker = health.add(URL)
    await start_prober(health, nursery)
    await trio.sleep(25)
    assert len(probes) == 3
    assert worker.health.state == "unhealthy"


async def test_a_worker_can_become_healthy_long_after_the_failure_threshold(
    health, probes, nursery, autojump_clock
):
    probes.reply = lambda request: httpx.Response(503)
    worker = health.add(URL)
    await start_prober(health, nursery)
    await trio.sleep(300)
    assert worker.health.state == "unhealthy"
    probes.reply = lambda request: httpx.Response(200)
    await trio.sleep(15)
    assert worker.health.state == "healthy"


async def test_the_first_failed_probe_of_a_new_worker_is_logged_once(
    health, probes, nursery, autojump_clock, caplog
):
    probes.reply = lambda request: httpx.Response(503, text="loading")
    health.add(URL)
    await start_prober(health, nursery)
    await trio.sleep(1)
    logged = [message for message in caplog.messages if "worker_not_up" in message]
    assert logged == [f"worker_not_up worker={URL} error=loading retry_every=10s"]
    await trio.sleep(100)
    assert sum("worker_not_up" in record.message for record in caplog.records) == 1


async def test_a_failed_probe_of_a_launched_worker_is_not_logged(
    health, probes, nursery, autojump_clock, caplog
):
    probes.reply = lambda request: httpx.Response(503)
    health.fleet.cordon(health.add(URL), LAUNCH_CORDON)
    await start_prober(health, nursery)
    await trio.sleep(1)
    assert not any("worker_not_up" in record.message for record in caplog.records)


async def test_a_dead_worker_is_not_probed_until_it_is_revived(
    health, probes, nursery, autojump_clock
):
    worker = health.add(URL)
    await start_prober(health, nursery)
    await trio.sleep(1)
    health.fleet.mark_dead(worker, NOW)
    before = len(probes)
    await trio.sleep(100)
    assert len(probes) == before
    assert probes.closed == 1
    health.fleet.revive(worker, NOW)
    await trio.sleep(1)
    assert len(probes) == before + 2
    assert worker.health.state == "healthy"


async def test_the_result_of_a_probe_that_began_before_a_revival_is_ignored(
    health, probes, nursery, autojump_clock
):
    async def respond_slowly():
        await trio.sleep(2)
        return httpx.Response(500)

    probes.reply = lambda request: respond_slowly()
    worker = health.add(URL)
    await start_prober(health, nursery)
    await trio.sleep(1)
    health.fleet.revive(worker, NOW)
    await trio.sleep(1.5)
    assert worker.health.consecutive_failures == 0


async def test_added_workers_are_probed_and_removed_ones_are_not(
    health, probes, nursery, autojump_clock
):
    await start_prober(health, nursery)
    health.add(URL)
    await trio.sleep(0.1)
    assert len(probes) == 1
    health.remove(URL)
    await trio.sleep(100)
    assert (len(probes), probes.closed) == (1, 1)
    health.add(URL)
    await trio.sleep(0.1)
    assert len(probes) == 2


async def test_a_slow_worker_delays_no_other_probe(health, probes, nursery, autojump_clock):
    async def never_respond():
        await trio.sleep_forever()

    probes.reply = lambda r: never_respond() if r.url.host == "127.0.0.2" else httpx.Response(200)
    slow = health.add(URL, "http://127.0.0.2:1")
    await start_prober(health, nursery)
    await trio.sleep(11)
    assert [host for _, host in probes].count("127.0.0.1") == 3
    assert slow.health.last_error == "no answer within 5 s"


async def test_parallel_probes_are_bounded_and_the_wait_is_not_part_of_the_timeout(
    health, probes, nursery, autojump_clock
):
    health.prober = Prober(health.fleet, health.config_store, jitter=lambda: 0.5, max_parallel=4)
    in_flight, peak = 0, 0

    async def respond(request):
        nonlocal in_flight, peak
        in_flight += 1
        peak = max(peak, in_flight)
        await trio.sleep(4)
        in_flight -= 1
        return httpx.Response(200)

    probes.reply = respond
    health.fleet.thresholds = Thresholds(rise=1, fall=1)
    health.configure(timeout_secs=5, interval_secs=600)
    health.add(*(f"http://127.0.0.{number}:1" for number in range(1, 21)))
    await start_prober(health, nursery)
    await trio.sleep(30)
    assert peak == 4
    assert {worker.health.state for worker in health.fleet.workers} == {"healthy"}


async def test_a_timeout_closes_the_client(health, probes, nursery, autojump_clock):
    async def never_respond():
        await trio.sleep_forever()

    probes.reply = lambda request: never_respond()
    health.add(URL)
    await start_prober(health, nursery)
    await trio.sleep(6)
    assert probes.closed == 1


async def test_a_shorter_interval_applies_at_once(health, probes, nursery, autojump_clock):
    health.configure(interval_secs=1000)
    health.add(URL)
    await start_prober(health, nursery)
    await trio.sleep(100)
    assert len(probes) == 2
    health.configure(interval_secs=10)
    await trio.sleep(11)
    assert len(probes) == 4


async def test_another_endpoint_applies_at_once(health, probes, nursery, autojump_clock):
    paths = []
    probes.reply = lambda r: paths.append(r.url.raw_path) or httpx.Response(200)
    health.add(URL)
    await start_prober(health, nursery)
    await trio.sleep(1)
    health.configure(endpoint="/ready now/ü")
    await trio.sleep(1)
    assert paths[-1] == b"/ready%20now/%C3%BC"


@pytest.mark.parametrize(
    ("status", "body", "error"),
    [
        (500, b"", "status=500"), (503, b"  \n", "status=503"), (500, b"CUDA error", "CUDA error"),
        (301, b"", "status=301"), (404, b"x" * 600, "x" * 512), (500, b"\xff", "\ufffd"),
    ],
)  # fmt: skip
async def test_the_error_of_a_failed_probe_is_the_body_or_the_status(
    health, probes, nursery, autojump_clock, status, body, error
):
    probes.reply = lambda request: httpx.Response(status, content=body)
    worker = health.add(URL)
    await start_prober(health, nursery)
    await trio.sleep(0.1)
    assert worker.health.last_error == error
    assert worker.health.last_status_code == status


@pytest.mark.parametrize("status", [200, 204, 299])
async def test_every_2xx_is_a_success(health, probes, nursery, autojump_clock, status):
    probes.reply = lambda request: httpx.Response(status)
    worker = health.add(URL)
    await start_prober(health, nursery)
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
    health, probes, nursery, autojump_clock, body, kept
):
    probes.reply = lambda request: httpx.Response(200, content=body)
    worker = health.add(URL)
    await start_prober(health, nursery)
    await trio.sleep(0.1)
    assert worker.health_body == kept
    assert worker.health.last_error is None


async def test_probe_once_waits_for_a_probe_in_progress(health, probes, nursery, autojump_clock):
    health.configure(success_threshold=2)
    await start_prober(health, nursery)
    worker = health.add(URL)
    await health.prober.probe_once(worker)
    assert len(probes) == 1
    assert worker.health.consecutive_successes == 1


async def test_probe_once_probes_a_healthy_worker(health, probes, nursery, autojump_clock):
    worker = health.add(URL)
    await start_prober(health, nursery)
    await trio.sleep(2)
    before = len(probes)
    await health.prober.probe_once(worker)
    assert len(probes) == before + 1


async def test_a_revived_worker_is_probed_under_its_new_epoch(
    health, probes, nursery, autojump_clock
):
    worker = health.add(URL)
    await start_prober(health, nursery)
    await trio.sleep(1)
    health.fleet.mark_dead(worker, NOW)
    health.fleet.revive(worker, NOW)
    await health.prober.probe_once(worker)
    assert worker.health.consecutive_successes == 1


async def test_a_probe_that_began_before_a_revival_is_followed_by_another(
    health, probes, nursery, autojump_clock
):
    replies = iter([500, 200, 200])

    async def respond_slowly():
        await trio.sleep(2)
        return httpx.Response(next(replies))

    probes.reply = lambda request: respond_slowly()
    worker = health.add(URL)
    await start_prober(health, nursery)
    await trio.sleep(1)
    health.fleet.revive(worker, NOW)
    await health.prober.probe_once(worker)
    assert (worker.health.consecutive_successes, worker.health.last_status_code) == (1, 200)


async def test_probe_once_ends_when_the_worker_is_removed(health, probes, nursery, autojump_clock):
    async def never_respond():
        await trio.sleep_forever()

    probes.reply = lambda request: never_respond()
    worker = health.add(URL)
    await start_prober(health, nursery)
    nursery.start_soon(health.prober.probe_once, worker)
    await trio.testing.wait_all_tasks_blocked()
    health.remove(URL)
    with trio.fail_after(30):
        await health.prober.probe_once(worker)


async def test_without_a_running_prober_probe_once_returns(health, probes):
    worker = health.add(URL)
    with trio.fail_after(30):
        await health.prober.probe_once(worker)
    assert probes == []


@pytest.mark.parametrize("prober", ["running", "stopped"])
async def test_probe_once_of_a_worker_that_is_not_probed_is_a_checkpoint(
    health, probes, nursery, prober
):
    worker = health.add(URL)
    if prober == "running":
        await start_prober(health, nursery)
        health.fleet.mark_dead(worker, NOW)
    with trio.testing.assert_checkpoints():
        await health.prober.probe_once(worker)


async def test_the_prober_can_be_started_again(health, probes, autojump_clock):
    health.add(URL)
    for expected in (1, 2):
        async with trio.open_nursery() as nursery:
            await nursery.start(health.prober.run)
            await trio.sleep(0.1)
            nursery.cancel_scope.cancel()
        assert (len(probes), probes.closed) == (expected, expected)


async def test_an_ejected_worker_is_probed_at_once(health, probes, nursery, autojump_clock):
    worker = health.add(URL)
    await start_prober(health, nursery)
    await trio.sleep(3)
    before = len(probes)
    for _ in range(3):
        health.fleet.observe_request_failure(worker, status=502, error="bad gateway", at=NOW)
    await trio.lowlevel.checkpoint()
    assert worker.health.state == "unhealthy"
    await trio.sleep(1)
    assert len(probes) == before + 2
    assert (worker.health.state, worker.health.is_half_open) == ("healthy", True)


async def test_with_probe_healthy_off_only_unhealthy_workers_are_probed(
    health, probes, nursery, autojump_clock
):
    health.configure(probe_healthy=False)
    health.fleet.thresholds = Thresholds(rise=2, fall=3, max_failed_requests=2)
    worker = health.add(URL)
    await start_prober(health, nursery)
    await trio.sleep(100)
    assert (len(probes), worker.health.state) == (2, "healthy")
    probes.reply = lambda request: httpx.Response(503)
    await trio.sleep(100)
    assert len(probes) == 2
    for _ in range(2):
        health.fleet.observe_request_failure(worker, status=None, error="refused", at=NOW)
    assert worker.health.state == "unhealthy"
    await trio.sleep(25)
    assert len(probes) > 3
    probes.reply = lambda request: httpx.Response(200)
    await trio.sleep(30)
    count = len(probes)
    assert worker.health.state == "healthy"
    await trio.sleep(100)
    assert len(probes) == count
    health.configure(probe_healthy=True)
    await trio.sleep(100)
    assert len(probes) > count + 5


async def test_a_startup_timeout_is_logged_once_and_probing_continues(
    health, probes, nursery, autojump_clock, caplog
):
    health.configure(startup_timeout_secs=60)
    probes.reply = lambda request: httpx.Response(503, text="loading")
    worker = health.add(URL)
    await start_prober(health, nursery)
    await trio.sleep(50)
    assert not [m for m in caplog.messages if "worker_startup_timeout" in m]
    await trio.sleep(200)
    logged = [m for m in caplog.messages if "worker_startup_timeout" in m]
    assert logged == [f"worker_startup_timeout worker={URL} after=60s error=loading"]
    probes.reply = lambda request: httpx.Response(200)
    await trio.sleep(30)
    assert worker.health.state == "healthy"


async def test_a_worker_that_was_healthy_once_has_no_startup_timeout(
    health, probes, nursery, autojump_clock, caplog
):
    health.configure(startup_timeout_secs=60)
    health.add(URL)
    await start_prober(health, nursery)
    await trio.sleep(5)
    probes.reply = lambda request: httpx.Response(503)
    await trio.sleep(300)
    assert not [m for m in caplog.messages if "worker_startup_timeout" in m]


async def test_an_unhealthy_worker_is_probed_more_often_than_a_long_interval(
    health, probes, nursery, autojump_clock
):
    health.configure(interval_secs=60)
    probes.reply = lambda request: httpx.Response(503)
    worker = health.add(URL)
    await start_prober(health, nursery)
    await trio.sleep(25)
    assert len(probes) == 3
    probes.reply = lambda request: httpx.Response(200)
    await trio.sleep(12)
    assert worker.health.state == "healthy"
    count = len(probes)
    await trio.sleep(50)
    assert len(probes) == count


async def test_a_worker_that_recovers_at_its_deadline_has_no_startup_timeout(
    health, probes, nursery, autojump_clock, caplog
):
    health.configure(startup_timeout_secs=15)
    probes.reply = lambda request: httpx.Response(503)
    worker = health.add(URL)
    await start_prober(health, nursery)
    await trio.sleep(11)
    probes.reply = lambda request: httpx.Response(200)
    await trio.sleep(5)
    assert worker.health.state == "healthy"  # the probe at its deadline succeeded
    await trio.sleep(100)
    assert not [m for m in caplog.messages if "worker_startup_timeout" in m]
