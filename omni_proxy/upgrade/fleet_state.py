"""Converts the fleet into records of the handed-over state, and restores them. No I/O, no clock.

Invariant: the health of a worker with a cordon that the next program would not remove is not
restored; it is probed there as after a start. The state journal of weights is not handled here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, cast, get_args

from omni_proxy.fleet.cordons import LAUNCH_CORDON, PAUSED, UNCERTAIN
from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.worker import ReportedRole, Worker
from omni_proxy.upgrade.state import WorkerRecord

# The state journal restores the first two, the launcher the third.
KEPT_CORDONS: Final = frozenset((UNCERTAIN, PAUSED, LAUNCH_CORDON))


def worker_records(fleet: Fleet) -> tuple[WorkerRecord, ...]:
    return tuple(map(_record, fleet.workers))


def _record(worker: Worker) -> WorkerRecord:
    return WorkerRecord(
        url=worker.url,
        health=worker.health.record(),
        registered_at=worker.registered_at,
        disabled_changed_at=worker.disabled_changed_at,
        cordons=tuple(sorted(worker.cordon_reasons)),
        weight_label=worker.version.label,
        weight_epoch=worker.version.epoch,
        instance=worker.instance,
        hop_line=worker.hop_line.decode("latin-1"),
        reported_role=worker.reported_role,
        reported_ranks=worker.reported_ranks,
        reported_adapters=worker.reported_adapters,
        reported_bootstrap_port=worker.reported_bootstrap_port,
        routed=worker.routed,
        succeeded=worker.succeeded,
        failed=worker.failed,
    )


def missing_workers(fleet: Fleet, records: Iterable[WorkerRecord]) -> list[str]:
    """URLs of routable workers that are not in the fleet."""
    return [each.url for each in records if not each.cordons and fleet.find(each.url) is None]


def restore_workers(fleet: Fleet, records: Iterable[WorkerRecord]) -> int:
    """Restore workers; return how many were found in the fleet."""
    count = 0
    for record in records:
        worker = fleet.find(record.url)
        if worker is not None:
            count += 1
            _restore(fleet, worker, record)
    return count


def _restore(fleet: Fleet, worker: Worker, record: WorkerRecord) -> None:
    worker.registered_at = record.registered_at or worker.registered_at
    worker.disabled_changed_at = record.disabled_changed_at or worker.disabled_changed_at
    classes = {**record.routed, **record.succeeded, **record.failed}
    for traffic in classes:
        worker.add_counts(
            traffic,
            routed=record.routed.get(traffic, 0),
            succeeded=record.succeeded.get(traffic, 0),
            failed=record.failed.get(traffic, 0),
        )
    if not KEPT_CORDONS.issuperset(record.cordons):
        return
    worker.health.restore(record.health)
    worker.instance = record.instance
    worker.hop_line = record.hop_line.encode("latin-1")
    if record.reported_role in get_args(ReportedRole):
        worker.report_role(cast("ReportedRole", record.reported_role))
    worker.report_adapters(record.reported_adapters)
    worker.report_bootstrap_port(record.reported_bootstrap_port)
    fleet.set_version(worker, record.weight_label, record.weight_epoch)
    fleet.report_ranks(worker, record.reported_ranks)
    fleet.restored(worker)
