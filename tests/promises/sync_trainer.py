"""A trainer as a process, driven by JSON lines: tools.training, a whole sync or step by step.

Its weights are those of `tiny.build(seed)`, so that whoever names the seed knows every byte.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import trio

ROOT = Path(__file__).parents[2]


class Trainer:
    """The child. `tell` orders and waits for the reply, which is {"gone": True} where it died."""

    def __init__(self):
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_WAIT_POLICY": "PASSIVE",
            "OMP_NUM_THREADS": "1",
        }
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.awaited = 0

    async def tell(self, do, **order):
        self.order(do, **order)
        return await self.reply()

    def order(self, do, **order):
        self.awaited += 2 if do == "open" else 1
        print(json.dumps({"do": do, **order}), file=self.process.stdin, flush=True)

    async def reply(self):
        line = await trio.to_thread.run_sync(self.process.stdout.readline, abandon_on_cancel=True)
        self.awaited -= 1
        if not line:
            self.process.wait()  # at its end a pipe closes before the process is seen to be dead
            return {"gone": True}
        told = json.loads(line)
        assert "broken" not in told, told["broken"]
        return told

    def living(self):
        return self.process.poll() is None

    def signal(self, number):
        self.process.send_signal(number)

    def kill(self):
        self.process.kill()
        self.process.wait()

    def close(self):
        self.kill()
        self.process.stdin.close()
        self.process.stdout.close()


class Trainers:
    """Children that live from test to test, and one that is warm for when the last one died."""

    def __init__(self):
        self._all = [Trainer(), Trainer()]

    def one(self):
        """One that waits for orders; the next one is not the same while this is busy."""
        free = [each for each in self._all if each.living() and not each.awaited]
        while len(free) < 2:
            self._all.append(Trainer())
            free.append(self._all[-1])
        return free[0]

    def two(self):
        one = self.one()
        return one, next(e for e in self._all if e.living() and not e.awaited and e is not one)

    def close(self):
        for each in self._all:
            each.close()


class Side:
    """What the child does."""

    def __init__(self):
        self.groups = {}

    def sync(self, url, seed, version, fault="none", **wishes):
        """A whole sync by tools.training; `why` is "" where it was good."""
        from tools.training.endpoint import Endpoint
        from tools.training.faults import FAULTS
        from tools.training.sync import Sync, Wishes

        wishes = Wishes(**{"timeout_secs": 30.0, **wishes})
        endpoint = Endpoint(url, wishes.timeout_secs)
        made = FAULTS[fault]()
        done = Sync(endpoint, weights(seed), version, wishes, made).run()
        endpoint.close()
        calls = [[each.path, each.status, each.body, each.secs] for each in done.calls]
        rival = getattr(made, "answer", None)
        return {
            "why": done.why,
            "secs": done.secs,
            "calls": calls,
            "rival": None if rival is None else [rival.status, rival.body],
        }

    def open(self, world, group="steps", timeout=30.0):
        """Replies twice: the port once the store is there, then `joined` or `fault`."""
        from tools.training.group import Group, Meeting, SyncFailed

        self.groups[group] = made = Group(Meeting(group, world, "gloo", timeout))
        say(port=made.port)
        try:
            made.join(Told())
        except SyncFailed as error:
            return {"fault": str(error)}
        return {"joined": True}

    def announce(self, seed, bucket_bytes=1 << 20):
        from tools.training.buckets import buckets_of

        told = [each.told() for each in buckets_of(weights(seed), bucket_bytes)]
        return {"buckets": told}

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


class Told:
    """Stands for the init call where the test makes it itself."""

    def refused(self):
        return ""

    wait = refused


@cache
def weights(seed):
    from omni_proxy.replica.models import tiny

    return {name: each.detach() for name, each in tiny.build(seed).named_parameters()}


@cache
def checksum(seed):
    """What a replica with the weights of this seed tells as its full_checksum."""
    from tools.training.learner import checksum_of

    return checksum_of(weights(seed))


def say(**reply):
    print(json.dumps(reply), flush=True)


def main():
    import torch

    torch.set_num_threads(1)
    side = Side()
    for line in sys.stdin:
        order = json.loads(line)
        try:
            reply = getattr(side, order.pop("do"))(**order)
        except (RuntimeError, KeyError, TypeError, ValueError) as error:
            reply = {"broken": repr(error)}
        say(**reply)
    os._exit(0)


if __name__ == "__main__":
    main()
