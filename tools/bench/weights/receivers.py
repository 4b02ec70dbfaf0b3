"""A process that broadcasts, and its receivers: plain torch, and the project's receiver.

The baseline of all weights results is `Plain`: a gloo broadcast into memory that was touched.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import IO, TYPE_CHECKING, Any, Literal

from tools.bench.harness.processes import running
from tools.bench.weights.memory import watched

if TYPE_CHECKING:
    from omni_proxy.process_group.receiver import FileRegion, PendingReceive

GROUP_SECS = 60.0


class WeightsBenchError(Exception):
    """A leg failed; the message has the output."""


class Sender:
    """The process that broadcasts. Orders are sent immediately; `received` waits for the answer."""

    def __init__(self, process: subprocess.Popen[str], count: int, nbytes: int) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._orders: IO[str] = process.stdin
        self._answers: IO[str] = process.stdout
        self.count, self.nbytes = count, nbytes
        self.order(do="blocks", count=count, nbytes=nbytes)
        self.received()

    def order(self, **order: object) -> None:
        print(json.dumps(order), file=self._orders, flush=True)

    def received(self) -> dict[str, Any]:
        line = self._answers.readline()
        if not line:
            raise WeightsBenchError("the process that broadcasts has ended")
        reported: dict[str, Any] = json.loads(line)
        return reported

    def opened(self, group: str, join: Callable[[int], None]) -> None:
        """Open a group of two; `join` gets the port and returns when it has joined."""
        self.order(do="open", group=group, world=2)
        join(int(self.received()["port"]))
        self.received()


@contextmanager
def sender(count: int, nbytes: int) -> Iterator[Sender]:
    argv = [sys.executable, "-m", "tools.bench.weights.broadcaster"]
    with running(argv, subprocess.PIPE) as process:
        yield Sender(process, count, nbytes)


class Plain:
    """The baseline: plain torch, into blocks that are already allocated."""

    def __init__(self, sends: Sender) -> None:
        import torch
        from torch._C._distributed_c10d import PrefixStore, TCPStore
        from torch.distributed import ProcessGroupGloo

        self._sends = sends
        self.blocks = [torch.ones(sends.nbytes, dtype=torch.uint8) for _ in range(sends.count)]
        self._group: Any = None

        def join(port: int) -> None:
            store = TCPStore("127.0.0.1", port, 2, False, wait_for_workers=False)
            inner = PrefixStore("cpu/", PrefixStore("plain/", PrefixStore("plain", store)))
            self._group = ProcessGroupGloo(inner, 1, 2, timedelta(seconds=GROUP_SECS))

        sends.opened("plain", join)

    def secs(self) -> float:
        from torch.distributed import BroadcastOptions

        options = BroadcastOptions()
        options.rootRank = 0
        started = time.perf_counter()
        self._sends.order(do="send", group="plain")
        for block in self.blocks:
            self._group.broadcast([block], options).wait()
        took = time.perf_counter() - started
        self._sends.received()
        return took


class OmniReceiver:
    """The receiver of the replica and of the proxy."""

    def __init__(self, sends: Sender, isolation: Literal["process", "thread"]) -> None:
        from omni_proxy.process_group.receiver import GroupLimits, Rendezvous, open_receiver
        from omni_proxy.process_group.tensor_plan import parse_plans

        self._sends, self._name = sends, isolation
        self._receiver = open_receiver(isolation, GroupLimits(), name=f"bench {isolation}")
        buckets = [
            {"names": [f"block-{n}"], "dtypes": ["uint8"], "shapes": [[sends.nbytes]]}
            for n in range(sends.count)
        ]
        self.plans = parse_plans({"num_buckets": len(buckets), "buckets": buckets}, dense=True)

        def join(port: int) -> None:
            place = Rendezvous("127.0.0.1", port, 1, 2, isolation, "gloo", GROUP_SECS)
            self._receiver.init(place)

        sends.opened(isolation, join)

    @property
    def names(self) -> list[str]:
        return [tensor.name for plan in self.plans for tensor in plan.tensors]

    def armed(self, *, into: FileRegion | None = None, digests: bool = False) -> PendingReceive:
        """Arm the receiver for one `order`; call `received` after it."""
        return self._receiver.arm(
            self._name, self.plans, ready_secs=GROUP_SECS, into=into, digests=digests
        )

    def order(self) -> None:
        self._sends.order(do="send", group=self._name)

    def received(self) -> None:
        self._sends.received()

    def secs(self, *, digests: bool = False) -> float:
        armed = self.armed(digests=digests)
        started = time.perf_counter()
        self.order()
        received = armed.wait(GROUP_SECS)
        took = time.perf_counter() - started
        received.close()
        self.received()
        return took

    def peak_buckets(self) -> float:
        """Peak additional memory of its processes in buckets, including hashing."""
        with watched(lambda: self._receiver.status()["processes"], 0) as peak:
            self.secs(digests=True)
        return peak.extra_bytes / self._sends.nbytes

    def close(self) -> None:
        self._receiver.close()
