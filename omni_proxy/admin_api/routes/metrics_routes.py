"""GET /metrics: the metrics of the proxy, in the Prometheus text format, or in OpenMetrics for
scrapers that prefer it.

Invariant: the text is rendered in slices, between which the data plane runs; requests that arrive
meanwhile share the next rendering. A scraper that does not read occupies that text, and one of a
bounded number of readers, for at most `SEND_SECS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

import trio
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.registry import Collector
from quart import Quart, Response, request

from omni_proxy.admin_api.responses import Body, ReaderLimit
from omni_proxy.admin_api.serializers.metrics_text import (
    CONTENT_TYPE,
    OPENMETRICS_TYPE,
    of_program,
    prefers_openmetrics,
)
from omni_proxy.admin_api.serializers.readiness import Readiness
from omni_proxy.admin_api.services import Services
from omni_proxy.telemetry.prometheus import fleet_families, request_families

SCRAPES: Final = 16
SEND_SECS: Final = 30.0
WORKERS_AT_ONCE: Final = 50
SLICE: Final = 200  # samples between two checkpoints


class _FamilySlice(Collector):
    def __init__(self, family: Metric, samples: slice) -> None:
        self._slice = Metric(family.name, family.documentation, family.type)
        self._slice.samples = family.samples[samples]

    def collect(self) -> Iterator[Metric]:
        yield self._slice


_EOF: Final = b"# EOF\n"


def render_in_slices(families: Iterable[Metric], *, openmetrics: bool = False) -> Iterator[bytes]:
    """The text of the families in slices. A family may have several consecutive parts."""
    generate: Callable[[CollectorRegistry], bytes] = (
        generate_openmetrics if openmetrics else generate_latest
    )
    family_name = ""
    for family in families:
        for begin in range(0, max(len(family.samples), 1), SLICE):
            registry = CollectorRegistry(auto_describe=False)
            registry.register(_FamilySlice(family, slice(begin, begin + SLICE)))
            text = generate(registry).removesuffix(_EOF)
            if family.name == family_name:  # HELP and TYPE were written
                text = text.split(b"\n", 2)[2]
            family_name = family.name
            yield text
    if openmetrics:
        yield _EOF


class _ExpositionBody(Body):
    def __init__(self, readers: ReaderLimit, text: bytes) -> None:
        super().__init__(readers)
        self._left = [text]

    async def __anext__(self) -> bytes:
        if not self._left:
            raise StopAsyncIteration
        return self._left.pop()


class MetricsRoutes:
    def __init__(self, services: Services, readiness: Readiness) -> None:
        self._services = services
        self._readiness = readiness
        self._fleet = services.workers.fleet
        self._metrics = services.telemetry.instruments.metrics
        self._readers = ReaderLimit(SCRAPES, "too_many_scrapes")
        self._render_lock = trio.Lock()
        # The newest text of each content type, and the time at which it was begun.
        self._texts: dict[str, tuple[float, bytes]] = {}

    def mount(self, app: Quart) -> None:
        app.add_url_rule("/metrics", "metrics", self.show)

    async def show(self) -> Response:
        self._readers.check_limit()
        openmetrics = prefers_openmetrics(request.headers.get("accept", ""))
        content_type = OPENMETRICS_TYPE if openmetrics else CONTENT_TYPE
        text = await self._exposition(content_type)
        response = Response(b"", content_type=content_type)
        response.headers["Vary"] = "accept"
        response.headers["Content-Length"] = str(len(text))
        response.response = _ExpositionBody(self._readers, text)
        response.timeout = SEND_SECS
        return response

    async def _exposition(self, content_type: str) -> bytes:
        """A text whose rendering began after the request arrived."""
        requested_at = trio.current_time()
        async with self._render_lock:
            begun_at, text = self._texts.get(content_type, (float("-inf"), b""))
            if begun_at >= requested_at:
                return text
            begun_at = trio.current_time()
            rendered = bytearray()
            await self._gather()
            openmetrics = content_type == OPENMETRICS_TYPE
            for piece in render_in_slices(self._families(), openmetrics=openmetrics):
                rendered += piece
                await trio.lowlevel.checkpoint()
            text = bytes(rendered)
            self._texts[content_type] = begun_at, text
            return text

    async def _gather(self) -> None:
        """Collect the workers' samples with checkpoints; reading the metrics has none."""
        for number, worker in enumerate(self._fleet.workers, start=1):
            self._metrics.gather(worker)
            if number % WORKERS_AT_ONCE == 0:
                await trio.lowlevel.checkpoint()

    def _families(self) -> Iterator[Metric]:
        yield from of_program(self._services, self._readiness)
        yield from fleet_families(self._fleet)
        yield from request_families(self._metrics)
