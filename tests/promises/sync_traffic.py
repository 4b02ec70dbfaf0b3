"""Clients that go on asking while weights change, and what they were told."""

from __future__ import annotations

from collections import defaultdict
from contextlib import asynccontextmanager

import trio

from tests.promises.sync_program import PATIENCE_SECS


class Traffic:
    """Clients that go on asking; what they were told, by the label on the answer."""

    def __init__(self, seen, clients=3):
        self._seen = seen
        self._clients = clients
        self.answers = []

    @asynccontextmanager
    async def going_on(self):
        self._over = trio.Event()
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
        """Label -> the different texts under it: one each, where no answer mixed two versions.

        Without those that say themselves that the weights have changed under them.
        """
        texts = defaultdict(set)
        for each in self.answers:
            if each.status_code == 200 and "x-omni-weight-version-end" not in each.headers:
                label = each.headers["x-omni-weight-version"]
                texts[label].add(each.json()["choices"][0]["message"]["content"])
        return texts

    def spanning(self):
        return [dict(a.headers) for a in self.answers if "x-omni-weight-version-end" in a.headers]
