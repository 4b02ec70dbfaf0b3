"""Real replicas of the tiny model as processes, weights for them, and a configuration with them."""

from __future__ import annotations

import signal
from contextlib import asynccontextmanager
from types import SimpleNamespace

import trio

from tests.ports import free_port
from tests.program_forkserver import REPLICA, forkserver

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 12, "temperature": 0}
UPDATE = "/update_weights_from_disk"


class Replica:
    """A replica that restarts at the same address with its first weights."""

    def __init__(self, *words: str) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._words = ("--model", "tiny", "--threads", "1", "--port", str(port), *words)

    async def start(self) -> None:
        self.process = await forkserver(*REPLICA).start("replica", *self._words)

    async def kill(self) -> None:
        self.process.kill()
        await self.process.wait()

    def stop(self) -> None:
        """Stops the process: it accepts calls but answers none until `go_on` or its end."""
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)


@asynccontextmanager
async def replicas(count: int, *words: str):
    all_replicas = [Replica(*words) for _ in range(count)]
    started = []
    try:
        for replica in all_replicas:
            await replica.start()
            started.append(replica)
        yield all_replicas
    finally:
        with trio.CancelScope(shield=True):
            for replica in started:
                await replica.kill()


def toml(fleet, weight_sync="", more=""):
    entries = "".join(f'[[workers]]\nurl = "{each.url}"\n' for each in fleet)
    return (
        "[server]\nport = 0\nqueue_size = 50\n[health]\ninterval_secs = 0.3\n"
        "on_threshold = 'unhealthy'\nsuccess_threshold = 1\n"
        f"{more}[weight_sync]\n{weight_sync}\n{entries}"
    )


def weights_in(folder):
    """Writes a file of other weights; returns its path, and the checksum of a rank with them."""
    from safetensors.torch import save_file

    from omni_proxy.process_group.broadcast.tensor_hashing import roll_up, tensor_digest
    from omni_proxy.replica.models import tiny

    tensors = {name: each.detach().clone() for name, each in tiny.build(7).named_parameters()}
    save_file(tensors, folder / "new.safetensors")
    digests = {
        name: tensor_digest(name, str(each.dtype), each.shape, each.numpy().tobytes())
        for name, each in tensors.items()
    }
    return SimpleNamespace(path=str(folder / "new.safetensors"), checksum=roll_up(digests))


async def known(running, count):
    """Waits until `count` workers are routable and their weight versions are known."""

    def holds(body):
        return (
            body["routable_workers"]
            == count
            == len([worker for worker in body["workers"] if worker["weight_version"]])
        )

    return await running.until("/workers", holds)
