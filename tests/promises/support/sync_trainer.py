"""A trainer as a process, controlled by JSON lines: whole syncs or single steps of tools.training.

Its weights are those of `tiny.build(seed)`, so a seed determines every byte.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import socket
from contextlib import suppress
from functools import cache

import trio

from tests.program_forkserver import CONNECTION, REPLICA, forkserver


class Trainer:
    """The child process. `tell` sends an order and waits for the reply, which is {"gone": True} if
    the process died."""

    def __init__(self):
        self.awaited = 0
        parent_end, child_end = socket.socketpair()
        with parent_end, child_end:
            self.process = forkserver(*REPLICA).over(child_end, __name__)
            self._orders, self._replies = parent_end.makefile("w"), parent_end.makefile("r")

    async def tell(self, do, **order):
        self.order(do, **order)
        return await self.reply()

    def order(self, do, **order):
        self.awaited += 2 if do == "open" else 1
        print(json.dumps({"do": do, **order}), file=self._orders, flush=True)

    async def reply(self):
        line = await trio.to_thread.run_sync(self._line, abandon_on_cancel=True)
        self.awaited -= 1
        if not line:
            self.process.wait()  # its pipe closes shortly before the process can be reaped
            return {"gone": True}
        body = json.loads(line)
        assert "broken" not in body, body["broken"]
        return body

    def _line(self):
        try:
            return self._replies.readline()
        except ConnectionResetError:
            return ""

    def living(self):
        return self.process.poll() is None

    def signal(self, number):
        self.process.send_signal(number)

    def kill(self):
        self.process.kill()
        self.process.wait()

    def close(self):
        self.kill()
        self._replies.close()
        with suppress(BrokenPipeError):  # the process died before it read an order
            self._orders.close()


class Trainers:
    """Child processes that are kept from test to test."""

    def __init__(self):
        self._all = []

    def one(self):
        """An idle trainer; while it is busy, the next call returns another one."""
        return self._free(1)[0]

    def two(self):
        return self._free(2)

    def _free(self, count):
        free = [trainer for trainer in self._all if trainer.living() and not trainer.awaited]
        while len(free) < count:
            self._all.append(Trainer())
            free.append(self._all[-1])
        return free[:count]

    def close(self):
        for trainer in self._all:
            trainer.close()


class TrainerCommands:
    """The orders that the child process executes."""

    def __init__(self, say):
        self.groups = {}
        self.transfers = {}
        self._say = say

    def program(self, words):
        """Runs tools/trainer with these arguments; returns its exit status and output."""
        from tools.training.__main__ import main as program

        out, errors = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
            status = program(words)
        return {"status": status, "out": out.getvalue(), "errors": errors.getvalue()}

    def sync(self, url, seed, version, fault="none", **options):
        """Runs a whole sync with tools.training; `why` is "" on success."""
        from tools.training.endpoint import Endpoint
        from tools.training.faults import FAULTS
        from tools.training.sync import Sync, SyncOptions

        options = SyncOptions(**{"timeout_secs": 90.0, **options})
        endpoint = Endpoint(url, options.timeout_secs)
        fault_case = FAULTS[fault]()
        done = Sync(endpoint, weights(seed), version, options, fault_case).run()
        endpoint.close()
        calls = [[each.path, each.status, each.body, each.secs] for each in done.calls]
        rival = getattr(fault_case, "answer", None)
        return {
            "why": done.why,
            "secs": done.secs,
            "calls": calls,
            "rival": None if rival is None else [rival.status, rival.body],
        }

    def transfer(self, url, seed, version, dies=False, **options):
        """Runs one sync by vLLM's routes; keeps the group for the next sync with the same options.

        `dies`: this process is killed before the last of its updates.
        """
        from tools.training.endpoint import Endpoint
        from tools.training.transfer import Transfer, TransferOptions

        key = (url, *sorted(options.items()))
        if key not in self.transfers:
            transfer_options = TransferOptions(**{"timeout_secs": 60.0, **options})
            self.transfers[key] = Transfer(
                Endpoint(url, transfer_options.timeout_secs), transfer_options
            )
        transfer = self.transfers[key]
        midway = (lambda: os.kill(os.getpid(), signal.SIGKILL)) if dies else lambda: None
        done = transfer.sync(weights(seed), version, midway)
        if transfer.group is None:
            del self.transfers[key]
        return {"why": done.why, "calls": [[each.path, each.status] for each in done.calls]}

    def leave_engines(self):
        """Closes all transfers."""
        for transfer in self.transfers.values():
            transfer.close()
            transfer.endpoint.close()
        self.transfers.clear()
        return {"left": True}

    def bare_store(self, nccl=False):
        """Opens a store as a vLLM trainer does; `nccl` puts the id of a communicator into it."""
        from torch._C._distributed_c10d import TCPStore

        self.store = TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False)
        if nccl:
            self.store.set("broadcast_from/0/0", b"id")
        return {"port": self.store.port}

    def open(self, world, group="steps", timeout=30.0):
        """Replies twice: with the port of the store, then with `joined` or `fault`."""
        from tools.training.group import Group, GroupRendezvous, SyncFailed

        self.groups[group] = joined_group = Group(GroupRendezvous(group, world, "gloo", timeout))
        self._say(port=joined_group.port)
        try:
            joined_group.join(PresetInit())
        except SyncFailed as error:
            return {"fault": str(error)}
        return {"joined": True}

    def announce(self, seed, bucket_bytes=1 << 20):
        from tools.training.buckets import buckets_of

        buckets = [each.to_dict() for each in buckets_of(weights(seed), bucket_bytes)]
        return {"buckets": buckets}

    def send(self, seed, group="steps", bucket_bytes=1 << 20, part="all"):
        """Broadcasts all messages, or the first `half` of each bucket's; `long` and `short` send
        more or fewer bytes than were announced for a tensor in the middle."""
        from tools.training.buckets import buckets_of
        from tools.training.group import SyncFailed

        try:
            for bucket in buckets_of(weights(seed), bucket_bytes):
                messages = bucket.messages(None)
                middle = len(messages) // 2
                if part == "half":
                    messages = messages[:middle]
                for number, message in enumerate(messages):
                    flat = message.reshape(-1)
                    if number == middle and part == "long":
                        flat = flat.repeat(2)
                    if number == middle and part == "short":
                        flat = flat[: len(flat) // 2]
                    self.groups[group].broadcast(flat)
                if part == "half":
                    break
        except SyncFailed as error:
            return {"fault": str(error)}
        return {"sent": True}

    def leave(self, group="steps"):
        self.groups.pop(group).leave()
        return {"left": True}


class PresetInit:
    """Replaces the init call, which the test sends itself."""

    def refused(self):
        return ""

    wait = refused


@cache
def weights(seed):
    from omni_proxy.replica.models import tiny

    return {name: each.detach() for name, each in tiny.build(seed).named_parameters()}


@cache
def expected_checksum(seed):
    """Returns the full_checksum of a replica with the weights of this seed."""
    from tools.training.learner import checksum_of

    return checksum_of(weights(seed))


def main(orders, replies):
    def say(**reply):
        print(json.dumps(reply), file=replies, flush=True)

    commands = TrainerCommands(say)
    for line in orders:
        order = json.loads(line)
        try:
            reply = getattr(commands, order.pop("do"))(**order)
        except (RuntimeError, KeyError, TypeError, ValueError) as error:
            reply = {"broken": repr(error)}
        say(**reply)
    os._exit(0)


if __name__ == "__main__":
    with socket.socket(fileno=CONNECTION) as connection:
        main(connection.makefile("r"), connection.makefile("w"))
