"""A real trainer's rank 0 in a process of its own, driven by JSON lines from a `Trainer`.

Importing torch is most of what one costs, so each is a fork of the process that has done that.
It makes its groups in the three ways that trainers do: `raw` (a gloo group over prefixed stores),
`helper` (torch's private constructor over a store that waits for nobody), `rendezvous` (the same
after a tcp:// rendezvous, whose store waits until every rank has been counted).
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sys
from contextlib import suppress
from datetime import timedelta

from tests.program_forkserver import CONNECTION, REPLICA, forkserver

# torch asks the DNS for the name of each address that it connects to or hears from, 127.0.0.1 too:
# where answers get lost, each would take 5 s. Of use to this process's own stores as well.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:2")

DTYPES = (
    "bfloat16", "float16", "float32", "float64", "int64", "int32", "int8", "uint8", "bool",
    "float8_e4m3fn", "float8_e5m2",
)  # fmt: skip


class Trainer:
    """The child process. `order` sends, `reply` reads, `tell` does both."""

    def __init__(self):
        self.awaited = 0
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = forkserver(*REPLICA).over(theirs, __name__)
        with ours:
            self._lines = ours.makefile("rw")

    def tell(self, do, **order):
        self.order(do, **order)
        return self.reply()

    def order(self, do, **order):
        self.awaited += 2 if do == "open" else 1
        print(json.dumps({"do": do, **order}), file=self._lines, flush=True)

    def reply(self):
        self.awaited -= 1
        try:
            line = self._lines.readline()
        except ConnectionResetError:
            line = ""
        return json.loads(line) if line else {"gone": True}

    def living(self):
        return self.process.poll() is None

    def kill(self):
        self.process.kill()
        self.process.wait()

    def close(self):
        self.kill()
        with suppress(BrokenPipeError):  # an order that it did not live to hear
            self._lines.close()


class TrainerPool:
    """Trainers that live from test to test."""

    def __init__(self):
        self._all = []

    def trainer(self):
        usable = [each for each in self._all if each.living() and not each.awaited]
        if not usable:
            usable.append(Trainer())
            self._all.append(usable[-1])
        return usable[0]

    def close(self):
        for each in self._all:
            each.close()


def free_port(host="127.0.0.1"):
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        listener.bind((host, 0))
        return listener.getsockname()[1]


def sha256(tensor):
    import torch

    flat = tensor.detach().contiguous().reshape(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().tobytes()).hexdigest()


class Side:
    """What the child does."""

    def __init__(self):
        self.groups = {}
        self.stores = {}

    def open(self, group, form="raw", world=2, timeout=30.0, host="127.0.0.1", port=0):
        """Replies twice: the port once the store is there, then `joined` or `fault`."""
        from torch.distributed import TCPStore

        patience = timedelta(seconds=timeout)
        if form == "rendezvous":
            port = port or free_port(host)
            say(port=port)
            from torch.distributed.rendezvous import rendezvous

            shown = f"[{host}]" if ":" in host else host
            store, _, _ = next(rendezvous(f"tcp://{shown}:{port}", 0, world, timeout=patience))
        else:
            # 0 is a free port: one that is looked up first may be somebody else's by then.
            store = TCPStore(host, port, world, True, patience, wait_for_workers=False)
            say(port=store.port)
        self.stores[group] = store
        try:
            self.groups[group] = _group(form, store, group, world, patience)
        except RuntimeError as error:
            return {"fault": str(error)}
        return {"joined": True}

    def send(self, group, tensors, flattened=False, stop_after=None):
        """Broadcasts made-up tensors [(dtype, shape, seed)]; replies with their digests."""
        import torch

        made = [make_tensor(*each) for each in tensors]
        if flattened:
            parts = [each.reshape(-1).view(torch.uint8) for each in made]
            self._broadcast(group, torch.cat(parts))
        else:
            for each in made[:stop_after]:
                # gloo knows no fp8: trainers send its bytes.
                raw = each.dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
                self._broadcast(group, each.view(torch.uint8) if raw else each)
        return {"sent": [sha256(each) for each in made]}

    def big(self, group, nbytes):
        """Broadcasts so many zeros: long enough on the way for something to happen meanwhile."""
        import torch

        self._broadcast(group, torch.zeros(nbytes, dtype=torch.uint8))
        return {"sent": []}

    def destroy(self, group):
        import torch.distributed as dist
        from torch.distributed import distributed_c10d as c10d

        ours = self.groups.pop(group)
        if ours in c10d._world.pg_names:
            dist.destroy_process_group(ours)
        self.stores.pop(group)
        return {"destroyed": True}

    def _broadcast(self, group, tensor):
        from torch.distributed import BroadcastOptions

        options = BroadcastOptions()
        options.rootRank = 0
        self.groups[group].broadcast([tensor.contiguous()], options).wait()


def _group(form, store, group, world, patience):
    from torch.distributed import PrefixStore, ProcessGroupGloo
    from torch.distributed import distributed_c10d as c10d

    named = PrefixStore(group, store)
    if form == "raw":
        inner = PrefixStore("cpu/", PrefixStore(f"{group}/", named))
        return ProcessGroupGloo(inner, 0, world, patience)
    made, _ = c10d._new_process_group_helper(
        world, 0, [], c10d.Backend("gloo"), named, group_name=group, timeout=patience
    )
    c10d._world.pg_group_ranks[made] = {rank: rank for rank in range(world)}
    return made


def make_tensor(dtype, shape, seed):
    import torch

    random = torch.Generator().manual_seed(seed)
    bare = getattr(torch, dtype)
    if dtype == "bool":
        return torch.randint(0, 2, shape, generator=random).to(bare)
    width = torch.empty(0, dtype=bare).element_size()
    count = torch.Size(shape).numel()
    raw = torch.randint(0, 256, (count * width,), dtype=torch.uint8, generator=random)
    return raw.view(bare).reshape(shape)


def say(**reply):
    print(json.dumps(reply), flush=True)


def main():
    side = Side()
    for line in sys.stdin:
        order = json.loads(line)
        try:
            reply = getattr(side, order.pop("do"))(**order)
        except (RuntimeError, KeyError) as error:
            reply = {"fault": str(error)}
        say(**reply)


if __name__ == "__main__":
    sys.stdin, sys.stdout = os.fdopen(CONNECTION), os.fdopen(os.dup(CONNECTION), "w")
    main()
    os._exit(0)  # whatever torch's threads do
