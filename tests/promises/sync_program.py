"""A fleet under a trainer, as processes: the proxy with its FILE, and real replicas of tiny.

Started once for the tests of a file. What tests ask of it is here too: labels and digests at every
step, traffic that goes on meanwhile, and what the processes hold (memory, threads, descriptors).
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import httpx
import trio

PATIENCE_SECS = 30  # a deadline for hung tests, not a claim about speed
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "temperature": 0}
INIT, DESTROY = "/init_weights_update_group", "/destroy_weights_update_group"
PREPARE, COMPLETE = "/prepare_weights_update", "/complete_weights_update"
ENV = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1"}
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
QUICK = """\
mode = "{mode}"
init_timeout_secs = 8
ready_timeout_secs = 8
receive_timeout_secs = 10
stall_timeout_secs = 3
{more}
"""


class Replica:
    """One real replica; starts again at the same address, with the weights it began with."""

    def __init__(self, *words):
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._words = ["--model", "tiny", "--threads", "1", "--port", str(self.port)]
        self._words += ["--weights-stall-secs", "3", "--weights-join-secs", "8", *words]
        self.process = None

    def start(self, log):
        argv = [sys.executable, "-m", "omni_proxy", "replica", *self._words]
        argv += ["--log-level", "warning"]
        with log.open("a") as out:
            self.process = subprocess.Popen(argv, stdout=out, stderr=out, env=ENV)

    def kill(self):
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    @property
    def pid(self):
        return self.process.pid


class Fleet:
    """The proxy at `url` before its replicas."""

    def __init__(self, folder, replicas, weight_sync):
        self.folder = folder
        self.replicas = list(replicas)
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._weight_sync = weight_sync
        self._log = folder / "proxy.log"
        self.proxy = None

    def __enter__(self):
        for number, each in enumerate(self.replicas):
            each.start(self.folder / f"replica-{number}.log")
        self.write()
        self.start_proxy()
        return self

    def __exit__(self, *_):
        for each in self.replicas:
            each.kill()
        self.proxy.send_signal(signal.SIGTERM)
        try:
            self.proxy.wait(20)
        finally:
            self.proxy.kill()
            self.proxy.wait()
        assert "Traceback" not in self.log(), self.log()

    def write(self):
        workers = "".join(f'[[workers]]\nurl = "{each.url}"\n' for each in self.replicas)
        text = FILE.format(port=self.port, weight_sync=self._weight_sync, workers=workers)
        aside = self.folder / "new.toml"
        aside.write_text(text)
        aside.rename(self.folder / "proxy.toml")

    def start_proxy(self):
        argv = [sys.executable, "-m", "omni_proxy", "--config", str(self.folder / "proxy.toml")]
        with self._log.open("a") as out:
            self.proxy = subprocess.Popen(argv, stdout=out, stderr=out, env=ENV)

    def kill_proxy(self):
        self.proxy.kill()
        self.proxy.wait()

    def log(self):
        return self._log.read_text()

    @asynccontextmanager
    async def client(self):
        async with httpx.AsyncClient(
            base_url=self.url, timeout=2 * PATIENCE_SECS, trust_env=False
        ) as client:
            yield Seen(self, client)

    def processes(self):
        """The proxy, the replicas, and all that they have started."""
        return [self.proxy.pid, *(each.pid for each in self.replicas if each.process)]


@contextmanager
def fleet(folder, *replicas, mode="coordinate", more=""):
    """`replicas`: the words of each one's command line. Deadlines are seconds, not minutes."""
    made = [Replica(*words) for words in replicas]
    with Fleet(folder, made, QUICK.format(mode=mode, more=more)) as running:
        yield running


class Seen:
    """The fleet through its proxy, as clients and operators see it."""

    def __init__(self, running, client):
        self.fleet = running
        self.client = client

    async def post(self, path, **body):
        answer = await self.client.post(path, json=body)
        return answer.status_code, answer.json()

    async def told(self, path):
        return (await self.client.get(path)).json()

    async def until(self, path, holds):
        """Ask again until it is so; the answer in which it was."""
        told = None
        try:
            with trio.fail_after(PATIENCE_SECS):
                while True:
                    try:
                        told = await self.told(path)
                        if holds(told):
                            return told
                    except httpx.TransportError as error:
                        told = repr(error)
                    await trio.sleep(0.02)
        except trio.TooSlowError:
            raise AssertionError(f"{path} stays at {told}\n{self.fleet.log()[-3000:]}") from None

    async def ready(self, count=None):
        """Until so many are routable and have told which weights they have."""
        wanted = len(self.fleet.replicas) if count is None else count

        def holds(told):
            named = [each for each in told["workers"] if each["weight_version"]]
            return told["routable_workers"] == wanted <= len(named)

        return await self.until("/workers", holds)

    async def digests(self):
        """Worker URL -> the digest over its whole tensors, asked of the replicas themselves."""
        found = {}

        async def ask(url):
            found[url] = await replica_digest(url)

        async with trio.open_nursery() as nursery:
            for each in self.fleet.replicas:
                if each.process.poll() is None:
                    nursery.start_soon(ask, each.url)
        return found

    async def chat(self, **fields):
        return await self.client.post("/v1/chat/completions", json={**CHAT, **fields})

    async def versions(self):
        """Worker URL -> (label, epoch), as /weights has them."""
        told = await self.told("/weights")
        return {
            each["worker"]: (each["weight_version"], each["weight_epoch"])
            for each in told["workers"]
        }


async def replica_digest(url):
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_SECS, trust_env=False) as client:
        told = (await client.post("/weights_checker", json={"action": "checksum"})).json()
    (found,) = [
        stage["data"]["full_checksum"]
        for stage in told["results"]
        if not stage["data"].get("skipped")
    ]
    return found


async def healthy(url):
    """Until the replica itself says so; the proxy may not have noticed yet that it was gone."""
    with trio.fail_after(PATIENCE_SECS):
        async with httpx.AsyncClient(base_url=url, timeout=5, trust_env=False) as client:
            while True:
                with suppress(httpx.TransportError):
                    if (await client.get("/health")).status_code == 200:
                        return
                await trio.sleep(0.05)


class Traffic:
    """Clients that go on asking; what they were told, by the label on the answer."""

    def __init__(self, seen, clients=3):
        self._seen = seen
        self._clients = clients
        self.answers = []
        self._over = trio.Event()

    @asynccontextmanager
    async def going_on(self):
        async with trio.open_nursery() as nursery:
            for _ in range(self._clients):
                nursery.start_soon(self._ask)
            await self.some_more()
            yield self
            await self.some_more()
            self._over.set()

    async def some_more(self, count=4):
        already = len(self.answers)
        with trio.fail_after(PATIENCE_SECS):
            while len(self.answers) < already + count:
                await trio.sleep(0.01)

    async def _ask(self):
        while not self._over.is_set():
            self.answers.append(await self._seen.chat())

    def failures(self):
        return [(a.status_code, a.text[:300]) for a in self.answers if a.status_code != 200]

    def texts(self):
        """Label -> the different texts under it: one each, where no answer mixed two versions."""
        texts = defaultdict(set)
        for each in self.answers:
            if each.status_code == 200:
                label = each.headers["x-omni-weight-version"]
                texts[label].add(each.json()["choices"][0]["message"]["content"])
        return texts

    def spanning(self):
        return [dict(a.headers) for a in self.answers if "x-omni-weight-version-end" in a.headers]


class Held:
    """What processes and all below them hold: files, threads, children, memory of their own and
    memory that they share."""

    def __init__(self, pids):
        every = [pid for root in pids for pid in tree(root)]
        self.children = len(every)
        self.threads = sum(len(_listed(f"/proc/{pid}/task")) for pid in every)
        self.files = sum(_files(pid) for pid in every)
        self.mib = sum(_pss_mib(pid, "Pss_Anon") for pid in every)
        self.shared_mib = sum(_pss_mib(pid, "Pss_Shmem") for pid in every)

    def __repr__(self):
        return repr(vars(self))


def tree(pid):
    found = [pid]
    for each in found:
        for task in _listed(f"/proc/{each}/task"):
            try:
                text = Path(f"/proc/{each}/task/{task}/children").read_text()
            except OSError:
                continue
            found.extend(map(int, text.split()))
    return found


def _listed(folder):
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _files(pid):
    """Without connections that their client has closed: a replica's server keeps its side of them
    until their keep-alive has run out."""
    closed = {
        f"socket:[{fields[9]}]"
        for fields in map(str.split, Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:])
        if fields[3] == "08"
    }
    found = []
    for number in _listed(f"/proc/{pid}/fd"):
        with suppress(OSError):
            found.append(os.readlink(f"/proc/{pid}/fd/{number}"))
    return len([each for each in found if each not in closed])


def _pss_mib(pid, kind):
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0.0
    found = re.search(rf"^{kind}: +(\d+) kB", text, re.MULTILINE)
    return int(found[1]) / 1024 if found else 0.0


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as trial:
        return trial.getsockname()[1]


def now():
    return time.monotonic()


def init_body(port, world, group="steps"):
    """What a trainer with rank 0 of `world` ranks sends."""
    return {
        "master_address": "127.0.0.1",
        "master_port": port,
        "rank_offset": 1,
        "world_size": world,
        "group_name": group,
        "backend": "gloo",
    }
