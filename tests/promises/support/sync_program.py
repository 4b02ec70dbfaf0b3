"""A fleet for trainers, as processes: real replicas of the tiny model, and a proxy.

The replicas are started once for all tests, and reset to the same weights before each start of a
proxy; one proxy runs at a time. FleetClient reads labels and digests of a fleet.
"""

from __future__ import annotations

import signal
from contextlib import asynccontextmanager, suppress

import httpx
import trio

from omni_proxy.shared.watchdog import STALL_EVENT
from tests.ports import free_port
from tests.program_forkserver import PROXY, REPLICA, forkserver
from tests.promises.support.fleet_program import POLL_SECS

FAR, BASE = "far", "base"
PATIENCE_SECS = 120  # a deadline for hung tests, not a claim about speed
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "temperature": 0}
INIT, DESTROY = "/init_weights_update_group", "/destroy_weights_update_group"
PREPARE, COMPLETE = "/prepare_weights_update", "/complete_weights_update"
FILE = """\
[server]
port = {port}
queue_size = 200
queue_timeout_secs = 30
[health]
interval_secs = 0.3
timeout_secs = 5
on_threshold = "unhealthy"
success_threshold = 1
[weight_sync]
{weight_sync}
{workers}
"""
# Transfers of this size take tenths of a second. A test that waits for one of these timeouts
# shortens it temporarily (Fleet.changed).
PATIENT = {
    "init_timeout_secs": 90,
    "ready_timeout_secs": 60,
    "receive_timeout_secs": 60,
    "stall_timeout_secs": 60,
}


class Replica:
    """One real replica; restarts at the same address, with its first weights."""

    def __init__(self, log, *words):
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.process = None
        self._log = log
        self._words = ["--model", "tiny", "--threads", "1", "--port", str(self.port), *words]
        self._words += ["--weights-join-secs", "90", "--weights-receive-secs", "60"]

    def start(self):
        with self._log.open("a") as out:
            self.process = forkserver(*REPLICA).popen(
                "replica", *self._words, "--log-level", "warning", stderr=out.fileno()
            )

    def kill(self):
        self.process.kill()
        self.process.wait()

    @property
    def pid(self):
        return self.process.pid

    async def begin_anew(self, model):
        """Resets the replica to the weights of that file, without a group."""
        if self.process.poll() is not None:
            self.start()
        await healthy(self.url)
        async with httpx.AsyncClient(
            base_url=self.url, timeout=PATIENCE_SECS, trust_env=False, verify=False
        ) as client:
            state = (await client.get("/server_info")).json()["weight_sync"]["state"]
            if state != "idle":
                self.kill()
                self.start()
                await healthy(self.url)
            await client.post("/continue_generation", json={})
            body = {"model_path": str(model), "weight_version": BASE}
            result = (await client.post("/update_weights_from_disk", json=body)).json()
            assert result["success"], result


class Fleets:
    """Replicas by name: `wide` has two ranks, `far` cannot read the proxy's files."""

    def __init__(self, folder):
        self._folder = folder
        separate_folder = folder / "elsewhere"
        separate_folder.mkdir()
        words = {
            "wide": ("--tp", "2"),
            "one": (),
            "other": (),
            FAR: ("--weights-root", str(separate_folder)),
        }
        self.replicas = {
            name: Replica(folder / f"{name}.log", *each) for name, each in words.items()
        }
        for replica in self.replicas.values():
            replica.start()
        self._model, self._unreached = (
            each / "model.safetensors" for each in (folder, separate_folder)
        )
        for file in (self._model, self._unreached):
            _write_model(file)
        self._running = None
        self._count = 0

    def of(self, *names, mode="coordinate", **settings):
        """Returns a proxy for these replicas, the running one if it has the same settings."""
        wanted = (names, mode, settings)
        if self._running is None or self._running.wanted != wanted:
            self.stop()
            trio.run(self._begin_anew)
            self._count += 1
            folder = self._folder / f"proxy-{self._count}"
            folder.mkdir()
            self._running = Fleet(folder, [self.replicas[each] for each in names], wanted)
        return self._running

    def alone(self):
        """Returns the replicas without a proxy, once all of them answer."""
        self.stop()
        trio.run(self._begin_anew)
        return self.replicas

    async def _begin_anew(self):
        async with trio.open_nursery() as nursery:
            for name, each in self.replicas.items():
                model = self._unreached if name == FAR else self._model
                nursery.start_soon(each.begin_anew, model)

    def stop(self):
        """Stops the proxy, if there is one."""
        if self._running is not None:
            running, self._running = self._running, None
            running.close()

    def close(self):
        """Stops the proxy and the replicas; `of` and `alone` start them again."""
        try:
            self.stop()
        finally:
            for each in self.replicas.values():
                each.kill()


class Fleet:
    """The proxy at `url` and its replicas. `wanted` has its settings."""

    def __init__(self, folder, replicas, wanted):
        self.folder = folder
        self.replicas = replicas
        self.wanted = wanted
        self.seed = 0  # the seed of the published weights
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = folder / "proxy.log"
        self._write()
        self.start_proxy()

    def close(self):
        self.proxy.send_signal(signal.SIGTERM)
        try:
            self.proxy.wait(20)
        finally:
            self.kill_proxy()
        assert "Traceback" not in self.log(), self.log()
        assert STALL_EVENT not in self.log(), self.log()

    def start_proxy(self):
        words = ("--config", str(self.folder / "proxy.toml"))
        with self._log.open("a") as out:
            self.proxy = forkserver(*PROXY).popen(*words, stderr=out.fileno())

    def kill_proxy(self):
        self.proxy.kill()
        self.proxy.wait()

    def log(self):
        return self._log.read_text()

    @asynccontextmanager
    async def client(self):
        async with httpx.AsyncClient(
            base_url=self.url, timeout=2 * PATIENCE_SECS, trust_env=False, verify=False
        ) as client:
            yield FleetClient(self, client)

    @asynccontextmanager
    async def changed(self, seen, **settings):
        """Changes settings of [weight_sync] temporarily."""
        self._write(**settings)
        await seen.reloaded()
        try:
            yield
        finally:
            self._write()
            with trio.CancelScope(shield=True), trio.move_on_after(PATIENCE_SECS):
                await seen.reloaded()

    def processes(self):
        """Returns the ids of the processes of the proxy and the replicas."""
        return [self.proxy.pid, *(each.pid for each in self.replicas)]

    def _write(self, **more):
        _, mode, settings = self.wanted
        weight_sync = {"mode": f'"{mode}"', **PATIENT, **settings, **more}
        text = FILE.format(
            port=self.port,
            weight_sync="\n".join(f"{key} = {value}" for key, value in weight_sync.items()),
            workers="".join(f'[[workers]]\nurl = "{each.url}"\n' for each in self.replicas),
        )
        written = self.folder / "new.toml"
        written.write_text(text)
        written.rename(self.folder / "proxy.toml")


class FleetClient:
    """The fleet through its proxy, as clients and operators see it."""

    def __init__(self, running, client):
        self.fleet = running
        self.client = client

    async def post(self, path, **body):
        answer = await self.client.post(path, json=body)
        return answer.status_code, answer.json()

    async def get_json(self, path):
        return (await self.client.get(path)).json()

    async def until(self, path, holds):
        """Repeats the GET until `holds(body)`; returns that body."""
        body = None
        try:
            with trio.fail_after(PATIENCE_SECS):
                while True:
                    try:
                        body = await self.get_json(path)
                        if holds(body):
                            return body
                    except httpx.TransportError as error:
                        body = repr(error)
                    await trio.sleep(POLL_SECS)
        except trio.TooSlowError:
            raise AssertionError(f"{path} stays at {body}\n{self.fleet.log()[-3000:]}") from None

    async def ready(self, count=None):
        """Waits until `count` workers, or all, are routable with a known version."""
        wanted = len(self.fleet.replicas) if count is None else count

        def holds(body):
            labelled = [worker for worker in body["workers"] if worker["weight_version"]]
            return body["routable_workers"] == wanted <= len(labelled)

        return await self.until("/workers", holds)

    async def whole(self):
        """Waits until no sync runs, and all workers are in rotation."""
        await self.until("/weights", _idle)
        await self.ready()

    async def reloaded(self):
        """Waits until the configuration file is loaded."""
        answer = await self.client.post("/reload")
        assert answer.status_code == 200, answer.text

    async def digests(self):
        """Returns the digest over whole tensors by worker URL, read from the replicas.

        Replicas with the same layout and tensors must have equal digests for each rank.
        """
        digests, ranks = {}, {}

        async def ask(url):
            digests[url], rank_digests = await replica_digests(url)
            ranks.setdefault((len(rank_digests), digests[url]), set()).add(rank_digests)

        async with trio.open_nursery() as nursery:
            for each in self.fleet.replicas:
                if each.process.poll() is None:
                    nursery.start_soon(ask, each.url)
        assert all(len(each) == 1 for each in ranks.values()), ranks
        return digests

    async def chat(self, **fields):
        return await self.client.post("/v1/chat/completions", json={**CHAT, **fields})

    async def versions(self):
        """Returns (label, epoch) by worker URL, from /weights."""
        body = await self.get_json("/weights")
        return {
            each["worker"]: (each["weight_version"], each["weight_epoch"])
            for each in body["workers"]
        }


async def replica_digest(url):
    """Returns the replica's digest over whole tensors."""
    return (await replica_digests(url))[0]


async def replica_digests(url):
    """Returns a replica's digest over whole tensors, and that of each rank.

    A replica refuses the call during an update, so it is repeated until the update ends.
    """
    async with httpx.AsyncClient(
        base_url=url, timeout=PATIENCE_SECS, trust_env=False, verify=False
    ) as client:
        with trio.fail_after(PATIENCE_SECS):
            while True:
                answer = await client.post("/weights_checker", json={"action": "checksum"})
                body = answer.json()
                if answer.status_code == 200:
                    break
                await trio.sleep(0.05)
    (data,) = [stage["data"] for stage in body["results"] if not stage["data"].get("skipped")]
    ranks = [each["data"] for each in data.get("rank_results", [])] or [data]
    return data["full_checksum"], tuple(each["per_gpu_checksum"] for each in ranks)


async def healthy(url):
    """Waits until the replica is healthy; the proxy may not have detected its restart yet."""
    with trio.fail_after(PATIENCE_SECS):
        async with httpx.AsyncClient(
            base_url=url, timeout=5, trust_env=False, verify=False
        ) as client:
            while True:
                with suppress(httpx.TransportError):
                    if (await client.get("/health")).status_code == 200:
                        return
                await trio.sleep(0.05)


def _idle(weights):
    busy = weights["operation"] or weights["waiting"] or weights["sync"]["state"] != "idle"
    return not busy and all(each["routable"] for each in weights["workers"])


def _write_model(file):
    from safetensors.torch import save_file

    from omni_proxy.replica.models import tiny

    tensors = tiny.build(0).named_parameters()
    save_file({name: each.detach().clone() for name, each in tensors}, file)


def init_body(port, world, group="steps"):
    """Returns the init body of a trainer with rank 0 of `world` ranks."""
    return {
        "master_address": "127.0.0.1",
        "master_port": port,
        "rank_offset": 1,
        "world_size": world,
        "group_name": group,
        "backend": "gloo",
    }
