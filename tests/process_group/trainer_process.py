"""Rank 0 of a real trainer in a separate process, driven by JSON lines from a `Trainer`.

Importing torch takes most of its start, so it is forked from a process that has imported torch.
It creates groups in the three ways that trainers use: `raw` (a gloo group over prefixed stores),
`helper` (torch's private constructor over a store that does not wait for ranks), and `rendezvous`
(the same after a tcp:// rendezvous, whose store waits until all ranks have joined).
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

# torch looks up the name of each peer address in the DNS, even of 127.0.0.1. Without these options,
# each lookup takes 5 s if the DNS does not answer. The stores of this process need them, too.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:2")

DTYPES = (
    "bfloat16", "float16", "float32", "float64", "int64", "int32", "int8", "uint8", "bool",
    "float8_e4m3fn", "float8_e5m2",
)  # fmt: skip


class Trainer:
    """The child process. `order` sends a command, `reply` reads a reply, `tell` does both."""

    def __init__(self):
        self.awaited = 0
        parent_end, child_end = socket.socketpair()
        with child_end:
            self.process = forkserver(*REPLICA).over(child_end, __name__)
        with parent_end:
            self._lines = parent_end.makefile("rw")

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
        with suppress(BrokenPipeError):  # a command that was not sent before it ended
            self._lines.close()


class TrainerPool:
    """Trainers that tests reuse. One that still owes a reply is not returned again."""

    def __init__(self):
        self._all = []

    def trainer(self):
        usable = [trainer for trainer in self._all if trainer.living() and not trainer.awaited]
        if not usable:
            usable.append(Trainer())
            self._all.append(usable[-1])
        return usable[0]

    def close(self):
        for trainer in self._all:
            trainer.close()


def free_port(host="127.0.0.1"):
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        listener.bind((host, 0))
        return listener.getsockname()[1]


def sha256(tensor):
    import torch

    flat = tensor.detach().contiguous().reshape(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().tobytes()).hexdigest()


class Commands:
    """The commands of the child process: one method for each."""

    def __init__(self):
        self.groups = {}
        self.stores = {}

    def open(self, group, form="raw", world=2, timeout=30.0, host="127.0.0.1", port=0):
        """Replies twice: with the port once the store exists, then with `joined` or `fault`."""
        from torch.distributed import TCPStore

        timeout_delta = timedelta(seconds=timeout)
        if form == "rendezvous":
            port = port or free_port(host)
            send_reply(port=port)
            from torch.distributed.rendezvous import rendezvous

            url_host = f"[{host}]" if ":" in host else host
            store, _, _ = next(
                rendezvous(f"tcp://{url_host}:{port}", 0, world, timeout=timeout_delta)
            )
        else:
            # Port 0 lets the kernel choose. A port looked up before could be in use by now.
            store = TCPStore(host, port, world, True, timeout_delta, wait_for_workers=False)
            send_reply(port=store.port)
        self.stores[group] = store
        try:
            self.groups[group] = _create_group(form, store, group, world, timeout_delta)
        except RuntimeError as error:
            return {"fault": str(error)}
        return {"joined": True}

    def send(self, group, tensors, flattened=False, stop_after=None):
        """Broadcasts generated tensors [(dtype, shape, seed)]. Replies with their digests."""
        import torch

        generated = [make_tensor(*spec) for spec in tensors]
        if flattened:
            parts = [tensor.reshape(-1).view(torch.uint8) for tensor in generated]
            self._broadcast(group, torch.cat(parts))
        else:
            for tensor in generated[:stop_after]:
                # gloo does not support fp8: trainers send its bytes.
                raw = tensor.dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
                self._broadcast(group, tensor.view(torch.uint8) if raw else tensor)
        return {"sent": [sha256(tensor) for tensor in generated]}

    def send_zeros(self, group, nbytes):
        """Broadcasts `nbytes` zeros. With many, a test can act during the transfer."""
        import torch

        self._broadcast(group, torch.zeros(nbytes, dtype=torch.uint8))
        return {"sent": []}

    def destroy(self, group):
        import torch.distributed as dist
        from torch.distributed import distributed_c10d as c10d

        process_group = self.groups.pop(group)
        if process_group in c10d._world.pg_names:  # torch has no public list of groups
            dist.destroy_process_group(process_group)
        self.stores.pop(group)
        return {"destroyed": True}

    def _broadcast(self, group, tensor):
        from torch.distributed import BroadcastOptions

        options = BroadcastOptions()
        options.rootRank = 0
        self.groups[group].broadcast([tensor.contiguous()], options).wait()


def _create_group(form, store, group, world, timeout):
    from torch.distributed import PrefixStore, ProcessGroupGloo
    from torch.distributed import distributed_c10d as c10d

    named = PrefixStore(group, store)
    if form == "raw":
        inner = PrefixStore("cpu/", PrefixStore(f"{group}/", named))
        return ProcessGroupGloo(inner, 0, world, timeout)
    # As trainers do (verl, slime): `new_group` of torch needs a default group.
    process_group, _ = c10d._new_process_group_helper(
        world, 0, [], c10d.Backend("gloo"), named, group_name=group, timeout=timeout
    )
    c10d._world.pg_group_ranks[process_group] = {rank: rank for rank in range(world)}
    return process_group


def make_tensor(dtype, shape, seed):
    import torch

    random = torch.Generator().manual_seed(seed)
    torch_dtype = getattr(torch, dtype)
    if dtype == "bool":
        return torch.randint(0, 2, shape, generator=random).to(torch_dtype)
    width = torch.empty(0, dtype=torch_dtype).element_size()
    count = torch.Size(shape).numel()
    raw = torch.randint(0, 256, (count * width,), dtype=torch.uint8, generator=random)
    return raw.view(torch_dtype).reshape(shape)


def send_reply(**reply):
    print(json.dumps(reply), flush=True)


def main():
    commands = Commands()
    for line in sys.stdin:
        order = json.loads(line)
        try:
            reply = getattr(commands, order.pop("do"))(**order)
        except (RuntimeError, KeyError) as error:
            reply = {"fault": str(error)}
        send_reply(**reply)


if __name__ == "__main__":
    sys.stdin, sys.stdout = os.fdopen(CONNECTION), os.fdopen(os.dup(CONNECTION), "w")
    main()
    os._exit(0)  # without waiting for the threads of torch
