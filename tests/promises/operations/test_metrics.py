import math
import signal
from contextlib import suppress
from functools import partial

import pytest
import trio
from prometheus_client.parser import text_string_to_metric_families

from omni_proxy.telemetry.metrics import Metrics
from omni_proxy.telemetry.recent_window import RecentWindow
from tests.promises.support.clients import STREAMED, Truncated, client_of, post
from tests.promises.support.dataplane_fixture import run_dataplane
from tests.promises.support.fakes import (
    LAST_CHUNK,
    PATIENCE_SECS,
    SSE_HEAD,
    answering,
    chunk,
    counted,
    fake_workers,
    hanging_up_after,
    resetting,
)
from tests.promises.support.fleet_program import chat, program, put, routable, toml, workers
from tests.telemetry.lint import problems

PATH = "/v1/chat/completions"
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":11,"completion_tokens":22}}\n\n'


async def metered(script, *requests, config=""):
    """Sends requests one after another to a data plane; returns its metrics and its worker."""
    async with fake_workers(script) as workers, run_dataplane(*workers, config=config) as opened:
        meters = opened.dataplane.recorders.meters = Metrics(opened.fleet, RecentWindow())
        for request in requests:
            async with opened.client() as client:
                await client.send(request)
                with suppress(Truncated):
                    await client.answer()
        return meters, opened.fleet.workers[0]


async def test_each_phase_of_a_real_stream_is_measured():
    async def send_three_events(call):
        await call.send(SSE_HEAD, chunk(b"data: one\n\n"))
        for _ in range(2):
            await trio.sleep(0.03)
            await call.send(chunk(b"data: more\n\n"))
        await call.send(LAST_CHUNK)

    meters, worker = await metered(send_three_events, post(STREAMED), post(STREAMED))
    cell, phases = meters.series[PATH, worker], meters.phases[PATH]
    assert cell.ends == {(None, 2, "completed"): 2}
    assert cell.chunks >= 6
    for timed in (cell.total, cell.first, phases.head, phases.overhead):
        assert sum(timed.counts) == 2
    assert sum(cell.between.counts) == cell.chunks - 2
    assert sum(cell.between.counts[1:]) >= 4  # the chunks that arrived after a pause
    assert cell.between.sum >= 4 * 0.025
    assert sum(phases.connect.counts) == 1  # the second request reused the connection
    assert phases.longest_gap.sum >= 2 * 0.025
    assert 0 < phases.overhead.sum < cell.total.sum
    assert cell.first.sum < cell.total.sum


async def test_gaps_of_a_stream_are_counted_while_it_runs_and_kept_if_it_breaks():
    waiting, broken = trio.Event(), trio.Event()

    async def breaking(call):
        await call.send(SSE_HEAD, chunk(b"data: one\n\n"))
        await trio.sleep(0.03)
        await call.send(chunk(b"data: two\n\n"))
        waiting.set()
        await broken.wait()
        call.close()

    async with fake_workers(breaking) as workers, run_dataplane(*workers) as opened:
        meters = opened.dataplane.recorders.meters = Metrics(opened.fleet, RecentWindow())
        async with opened.client() as client:
            await client.send(post(STREAMED))
            with trio.fail_after(PATIENCE_SECS):
                await waiting.wait()
                between = meters.series[PATH, opened.fleet.workers[0]].between
                while not any(between.counts):
                    await trio.sleep(0.005)
            measured = (sum(between.counts[1:]), between.sum)
            assert measured[0] >= 1
            assert measured[1] >= 0.025
            assert not meters.series[PATH, opened.fleet.workers[0]].ends
            broken.set()
            with suppress(Truncated):
                await client.answer()
        (cell,) = (cell for cell in meters.series.values() if cell.ends)
        assert cell.ends == {(None, 2, "stream_error"): 1}
        assert (sum(cell.between.counts[1:]), cell.between.sum) == measured


async def test_a_response_without_a_stream_has_no_gaps():
    async def piecewise(call):
        await call.send(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nab")
        await trio.sleep(0.02)
        await call.send(b"cd")

    meters, worker = await metered(piecewise, post())
    cell = meters.series[PATH, worker]
    assert cell.chunks == 2
    assert not any(cell.between.counts)


@pytest.mark.parametrize("processes", [1, 2])
async def test_the_running_program_reports_the_gaps_of_a_running_stream(tmp_path, processes):
    file, enough = tmp_path / "proxy.toml", trio.Event()

    async def keep_streaming(call):
        if call.line.startswith("GET "):
            await call.send(counted(b"", status="404 No"))
            return
        await call.send(SSE_HEAD, chunk(b"data: one\n\n"))
        while not enough.is_set():
            await trio.sleep(0.03)
            await call.send(chunk(b"data: more\n\n"))
        await call.send(LAST_CHUNK)

    async with fake_workers(keep_streaming) as fleet:
        put(file, toml(fleet, more=f"processes = {processes}\n"))
        async with program("--config", file) as running:
            await running.until_routable(*fleet)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(partial(running.ask, stream=True))
                name, key, body = "omni_proxy_time_between_chunks_seconds", (PATH, fleet[0].url), {}
                with trio.fail_after(PATIENCE_SECS):
                    # A busy data plane may read several events as one chunk.
                    while body.get(f"{name}_count", {}).get(key, 0) < 2:
                        await trio.sleep(0.02)
                        body = await scraped(running)
                    while body[f"{name}_sum"][key] < 2 * 0.025:
                        await trio.sleep(0.02)
                        body = await scraped(running)
                assert body["omni_proxy_requests_in_flight"] == {(): 1}
                assert "omni_proxy_request_duration_seconds_count" not in body
                enough.set()


@pytest.mark.parametrize(
    ("script", "request_", "end"),
    [
        (answering(counted(b"no", status="404 No")), post(), (None, 4, "completed")),
        (hanging_up_after(SSE_HEAD, chunk(b"data: 1\n\n")), post(STREAMED),
         (None, 2, "stream_error")),
        (answering(counted(b"{}")), post(b"{"), (None, 4, "refused")),
    ],
)  # fmt: skip
async def test_every_end_is_counted_once(script, request_, end):
    meters, worker = await metered(script, request_)
    counts = [item for cell in meters.series.values() for item in cell.ends.items()]
    assert counts == [(end, 1)] or (end[2] == "refused" and counts[0][1] == 1)
    assert sum(count for _, count in counts) == 1
    assert end[2] == "refused" or (PATH, worker) in meters.series


async def test_failed_attempts_are_counted_by_worker_and_cause():
    config = "[routing]\nmax_total_retries = 2\nmax_worker_retries = 0\n[health]\n"
    meters, worker = await metered(resetting, post(), config=config + "failure_threshold = 9\n")
    assert meters.failed_attempts == {(worker, "reset_before_response"): 2}
    assert meters.retries == 1


@pytest.mark.parametrize(
    "pieces",
    [
        (SSE_HEAD, chunk(b"data: 1\n\n"), chunk(USAGE), chunk(b"data: [DONE]\n\n"), LAST_CHUNK),
        (SSE_HEAD, chunk(USAGE), LAST_CHUNK),
        (counted(b'{"usage":{"prompt_tokens":11,"completion_tokens":22}}'),),
    ],
)
async def test_usage_is_counted_only_if_usage_metrics_are_enabled(pieces):
    async def piecewise(call):
        for piece in pieces:
            await call.send(piece)
            await trio.sleep(0.01)

    meters, worker = await metered(
        piecewise, post(STREAMED), config="[server]\nusage_metrics = true\n"
    )
    assert meters.series[PATH, worker].tokens == {(None, "input"): 11, (None, "output"): 22}
    meters, worker = await metered(piecewise, post(STREAMED))
    assert not meters.series[PATH, worker].tokens


async def scraped(running) -> dict[str, dict[tuple[str, ...], float]]:
    """Scrapes and lints the metrics; returns samples by name and label values."""
    text = (await running.client.get("/metrics")).text
    assert problems(text) == []
    samples: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = tuple(sample.labels[label] for label in sorted(sample.labels))
            samples.setdefault(sample.name, {})[key] = sample.value
    return samples


async def test_the_running_program_counts_its_requests(tmp_path):
    file = tmp_path / "proxy.toml"
    async with workers("one", "two") as fleet:
        put(file, toml(fleet))
        async with program("--config", file) as running:
            await running.until_routable(*fleet)
            for number in range(40):
                await running.ask(model=f"name-{number}", stream=bool(number % 2))
            json = {"content-type": "application/json"}
            bad = await running.client.post(PATH, content=b"{", headers=json)
            assert bad.status_code == 400
            body = await scraped(running)
            requests = body["omni_proxy_requests_total"]
            for worker in fleet:
                assert requests["completed", "other", PATH, "2xx", worker.url] == worker.requests
            assert requests["refused", "", PATH, "4xx", ""] == 1
            models = {key[1] for key in requests}
            assert models == {"", "other"}
            first = body["omni_proxy_time_to_first_chunk_seconds_count"]
            assert sum(first.values()) == 40
            assert body["omni_proxy_requests_in_flight"] == {(): 0}
            assert body["omni_proxy_workers"][("routable",)] == 2
            assert body["process_open_fds"][()] > 5


async def test_metrics_can_be_disabled_and_enabled_by_a_reload(tmp_path):
    file = tmp_path / "proxy.toml"
    async with workers("one") as fleet:
        put(file, toml(fleet))
        async with program("--config", file) as running:
            await running.until_routable(*fleet)
            for more, count in (("", 1), ("metrics = false\n", 1), ("", 2)):
                put(file, toml(fleet, more=more))
                running.process.send_signal(signal.SIGHUP)
                await running.until("/feed?once=true", lambda t, on=not more: t["metrics"] is on)
                await running.ask()
                totals = (await scraped(running))["omni_proxy_requests_total"]
                assert sum(v for key, v in totals.items() if key[2] == PATH) == count


async def test_clients_that_do_not_read_their_metrics_cost_no_request(tmp_path):
    file = tmp_path / "proxy.toml"
    async with workers("one") as fleet:
        put(file, toml(fleet))
        async with program("--config", file) as running:
            await running.until_routable(*fleet)
            address = running.client.base_url.netloc.decode()
            async with trio.open_nursery() as nursery:

                async def hang(path: str) -> None:
                    async with client_of(address) as client:
                        await client.send(f"GET {path} HTTP/1.1\r\nhost: a\r\n\r\n".encode())
                        await trio.sleep_forever()

                for _ in range(40):
                    nursery.start_soon(hang, "/metrics")
                    nursery.start_soon(hang, "/feed")
                await running.until("/status", lambda body: body["data_plane"]["connections"] >= 80)
                with trio.fail_after(PATIENCE_SECS):
                    for _ in range(20):
                        assert (await running.ask(stream=True)).status_code == 200
                    while (await running.client.get("/metrics")).status_code != 200:
                        await trio.sleep(0.05)
                assert (await running.client.get("/feed?once=true")).status_code == 200
                running.process.send_signal(signal.SIGTERM)  # they do not delay the shutdown either
                with trio.fail_after(PATIENCE_SECS):
                    assert await running.process.wait() == 0
                nursery.cancel_scope.cancel()


async def test_log_lines_lost_on_a_full_disk_are_counted(tmp_path):
    file = tmp_path / "proxy.toml"
    logs = 'access_log = "/dev/full"\nroute_log = "/dev/full"\n'
    async with workers("one") as fleet:
        put(file, toml(fleet, more=logs))
        async with program("--config", file) as running:
            await running.until_routable(*fleet)
            for _ in range(5):
                assert (await running.ask()).status_code == 200
            lost = 0.0
            with trio.fail_after(PATIENCE_SECS):
                while lost < 5:
                    lost_lines = (await scraped(running))["omni_proxy_log_lines_lost_total"]
                    lost = min(
                        lost_lines[f"{kind}_log", "unwritable"] for kind in ("access", "route")
                    )
            await running.until_logged("log_write_failed target=/dev/full")


async def test_a_drained_worker_finishes_its_stream_and_gets_no_other(tmp_path):
    file = tmp_path / "proxy.toml"
    async with workers("one", "two") as fleet:
        one, two = fleet
        put(file, toml(fleet))
        async with program("--config", file) as running:
            await running.until_routable(*fleet)
            one.gate = two.gate = trio.Event()
            responses = []

            async def stream() -> None:
                responses.append(await running.client.post(PATH, json=chat(stream=True)))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(stream)
                nursery.start_soon(stream)
                for worker in fleet:
                    await worker.halfway.wait()
                drained = await running.client.post(f"/workers/{one.url}/drain")
                assert (drained.status_code, drained.json()["status"]) == (202, "draining")
                assert routable(await running.get_json("/workers")) == {two.url}
                drain = (await running.get_json(f"/workers/{one.url}"))["draining"]
                assert (drain["state"], drain["in_flight"]) == ("draining", 1)
                one.gate.set()
            assert [response.text.count("data:") for response in responses] == [3, 3]
            await running.until(
                f"/workers/{one.url}", lambda t: t["draining"]["state"] == "drained"
            )
            before = one.requests
            for _ in range(4):
                await running.ask()
            assert one.requests == before
            deleted = await running.client.delete(f"/workers/{one.url}?drain=true")
            assert deleted.json()["drained"] is True
            assert not math.isnan((await scraped(running))["omni_proxy_ready"][()])
            await running.until_logged("worker_drained")
