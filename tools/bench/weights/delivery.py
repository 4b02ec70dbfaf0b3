"""The delivery of a version from a trainer to a worker with `[weight_sync] mode = "receive"`.

The proxy's part: a child process receives into the version's file in shared memory. The replica's
part: its disk loader prefetches bucket by bucket, and reads the rest after the last byte. HTTP
between the two and the worker's swap are not included.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tools.bench.weights.receivers import GROUP_SECS, OmniReceiver, WeightsBenchError

SHARED_MEMORY = "/dev/shm"
POLL_SECS = 1.0


class Relayed:
    """A worker whose tensors are the sender's blocks, which `ours` receives."""

    def __init__(self, ours: OmniReceiver, blocks: Sequence[Any]) -> None:
        import torch

        from omni_proxy.replica.weights.live_tensors import LiveTensors
        from omni_proxy.replica.weights.weights_folder import WeightsFolder

        self._ours = ours
        model = torch.nn.Module()
        for name, block in zip(ours.names, blocks, strict=True):
            model.register_buffer(name, block.clone())
        self._target = LiveTensors(model)
        self._folder = WeightsFolder(SHARED_MEMORY)

    def secs(self) -> float:
        """Seconds from the order to send until the worker has all; raises WeightsBenchError."""
        root = Path(tempfile.mkdtemp(prefix="bench-weights-", dir=SHARED_MEMORY))
        try:
            return self._timed(root / "v1.partial")
        finally:
            shutil.rmtree(root)

    def _timed(self, folder: Path) -> float:
        from omni_proxy.process_group.receiver import FileRegion
        from omni_proxy.weight_sync.delivery.prefetch import IncomingVersion
        from omni_proxy.weight_sync.store.draft import Draft

        ours = self._ours
        block = Draft(1, folder, in_memory=True).add([plan.tensors for plan in ours.plans])
        place = FileRegion(str(block.path), block.starts)
        armed = ours.armed(into=place)
        coming = IncomingVersion(armed, place, ours.plans)
        follower = threading.Thread(target=self._follow, args=[coming], name="bench-worker")
        started = time.perf_counter()
        ours.order()
        follower.start()
        armed.wait(GROUP_SECS).close()
        manifest = {"files": [block.path.name]}
        whole = folder.rename(folder.with_name("v1"))  # as in the version store
        staged = self._folder.stage({"model_path": str(whole), "manifest": manifest}, self._target)
        took = time.perf_counter() - started
        follower.join()
        staged.apply_without_rollback()
        staged.forget()
        ours.received()
        self._require_whole()
        return took

    def _follow(self, coming: Any) -> None:
        from omni_proxy.replica.weights.live_tensors import WeightsError

        done = 0
        with suppress(WeightsError):  # the folder was renamed during the read
            while done < len(coming.plans) and coming.pending.fault() is None:
                done = coming.pending.wait_past(done, POLL_SECS).buckets_done
                reported = {"model_path": coming.region.path, "nbytes": coming.final_bytes(done)}
                self._folder.prefetch(reported, self._target)

    def _require_whole(self) -> None:
        for number, (name, tensor) in enumerate(self._target):
            if not bool((tensor == number % 251).all()):
                raise WeightsBenchError(f"the worker has other bytes of {name} than were sent")
