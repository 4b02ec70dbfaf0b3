"""Clients that keep sending requests while weights change, and their responses."""

from __future__ import annotations

from collections import defaultdict
from contextlib import asynccontextmanager

import trio

from tests.promises.support.sync_program import PATIENCE_SECS

PAUSE_SECS = 0.1  # without a pause, clients would compete with the replicas for CPU time


class Traffic:
    """Clients that send requests in a loop; keeps their responses."""

    def __init__(self, seen, clients=3):
        self._seen = seen
        self._clients = clients
        self.answers = []

    @asynccontextmanager
    async def keep_asking(self):
        self._stopped = trio.Event()
        async with trio.open_nursery() as nursery:
            for _ in range(self._clients):
                nursery.start_soon(self._ask)
            await self.wait_for_more()
            yield self
            await self.wait_for_more()
            self._stopped.set()

    async def wait_for_more(self, count=4):
        before = len(self.answers)
        with trio.fail_after(PATIENCE_SECS):
            while len(self.answers) < before + count:
                await trio.sleep(0.01)

    async def _ask(self):
        while not self._stopped.is_set():
            self.answers.append(await self._seen.chat())
            await trio.sleep(PAUSE_SECS)

    def failures(self):
        return [(a.status_code, a.text[:300]) for a in self.answers if a.status_code != 200]

    def texts(self):
        """Returns the texts by label: one for each, unless a response mixed two versions.

        Leaves out responses whose headers report a change of weights.
        """
        texts = defaultdict(set)
        for answer in self.answers:
            if answer.status_code == 200 and "x-omni-weight-version-end" not in answer.headers:
                label = answer.headers["x-omni-weight-version"]
                texts[label].add(answer.json()["choices"][0]["message"]["content"])
        return texts

    def spanning(self):
        return [dict(a.headers) for a in self.answers if "x-omni-weight-version-end" in a.headers]
