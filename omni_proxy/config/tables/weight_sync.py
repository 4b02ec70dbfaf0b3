"""The table `[weight_sync]`: transfers of weights from a trainer. Values only."""

from typing import Literal

from msgspec import Struct

from omni_proxy.config.fields import (
    AtLeastOne,
    Duration,
)


class WeightSyncConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    # Members of the trainer's process group: each worker with its own ranks (coordinate), the proxy
    # for all workers (receive), or both. off: calls are sent to every worker unchanged.
    mode: Literal["coordinate", "receive", "both", "off"] = "coordinate"
    # auto: the trainer's choice.
    backend: Literal["auto", "nccl", "gloo"] = "auto"
    # Receiving blocks in the backend's native code: a separate process can be killed.
    isolation: Literal["process", "thread"] = "process"
    # Until every rank has joined the process group.
    init_timeout_secs: Duration = 1800.0
    # Until every rank is ready to receive.
    ready_timeout_secs: Duration = 60.0
    # From the trainer's complete call to the last bucket.
    receive_timeout_secs: Duration = 300.0
    # A transfer without progress for this long is aborted.
    stall_timeout_secs: Duration = 30.0
    # Folder of stored versions; empty: next to the state file.
    store_dir: str = ""
    keep_versions: AtLeastOne = 2
    # checksum: all replicas must have the same checksum before they serve again.
    verify: Literal["checksum", "off"] = "checksum"
    # After a partial failure: keep the failed workers out, roll back all, or retry the failed ones.
    on_failure: Literal["quarantine", "rollback", "forward"] = "quarantine"
    # Time for requests in flight to end before their worker is paused or updated.
    drain_secs: Duration = 0.0
    # New requests during an update: held here, 503, or passed on.
    while_updating: Literal["hold", "shed", "pass"] = "hold"
