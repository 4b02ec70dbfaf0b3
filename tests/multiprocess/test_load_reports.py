import trio
from msgspec.structs import astuple

from omni_proxy.multiprocess.ipc.messages import LoadRow
from omni_proxy.multiprocess.load_reports import SEND_SECS, LoadCollector, take_rows
from omni_proxy.wire.load_report import EngineLoad, LoadReport
from tests.fleet.entries import entry, fleet_of


def load(waiting, at):
    return EngineLoad(LoadReport(waiting, 0.5), at)


async def test_reports_are_sent_in_batches_and_received_ones_are_not_sent_back(
    nursery, autojump_clock
):
    fleet, other_fleet = fleet_of(entry("a"), entry("b")), fleet_of(entry("a"), entry("b"))
    ids = {worker: (serial, serial) for serial, worker in enumerate(fleet.workers)}
    other_workers = dict(enumerate(other_fleet.workers))
    sent = []
    nursery.start_soon(LoadCollector(fleet.loads, ids.get, sent.append).run)
    a, b = fleet.workers
    for number in range(5):
        fleet.loads.report(a, load(float(number), number))
    fleet.loads.report(b, load(1.0, 1))
    await trio.sleep(2 * SEND_SECS)
    (rows,) = sent
    assert sorted(map(astuple, rows)) == [(0, 4.0, 0.5, 4), (1, 1.0, 0.5, 1)]
    assert {worker.url for worker in take_rows(other_fleet.loads, rows, other_workers.get)} == {
        a.url,
        b.url,
    }
    assert other_fleet.workers[0].engine_load == load(4.0, 4)

    take_rows(fleet.loads, [LoadRow(0, 9.0, None, 10)], dict(enumerate(fleet.workers)).get)
    await trio.sleep(2 * SEND_SECS)
    assert len(sent) == 1
    assert a.engine_load.report.waiting == 9.0


def test_rows_of_removed_workers_and_older_rows_are_ignored():
    fleet = fleet_of(entry("a"))
    (a,) = fleet.workers
    fleet.loads.report(a, load(3.0, 5))
    assert (
        take_rows(fleet.loads, [LoadRow(7, 1.0, None, 9), LoadRow(1, 0.0, None, 4)], {1: a}.get)
        == []
    )
    assert a.engine_load == load(3.0, 5)
