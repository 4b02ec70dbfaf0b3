"""Follows the addresses of one `[[discover]]` of kind dns.

Invariant: an answer is valid until the next complete one; a failure (SERVFAIL, REFUSED, timeout)
changes nothing. The query is repeated after `refresh_secs` or the TTL, whichever is shorter.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import trio

from omni_proxy.config.tables.discover import DiscoverEntry
from omni_proxy.discovery.dns_answers import NO_TTL, DnsFailure, DnsState
from omni_proxy.discovery.endpoints import SourceEndpoint, SourceStatus

if TYPE_CHECKING:
    from omni_proxy.discovery_watch.dns_queries import DnsQueries

_log = logging.getLogger(__name__)


class DnsWatcher:
    """Watches one entry. `on_change` gets the endpoints that an answer has changed."""

    def __init__(
        self, entry: DiscoverEntry, on_change: Callable[[list[SourceEndpoint]], None]
    ) -> None:
        self.state = DnsState(entry)
        self.status = SourceStatus(entry.name, entry.kind)
        self._entry = entry
        self._on_change = on_change

    async def run(self) -> None:
        # In a thread, because the first import takes the time of hundreds of requests.
        queries = await trio.to_thread.run_sync(_import_queries, self._entry)
        while True:
            ttl_secs = NO_TTL
            try:
                addresses, ttl_secs = await queries.ask()
            except DnsFailure as error:
                if self.status.failed(str(error), datetime.now(UTC)):
                    _log.warning(
                        "discovery_failed source=%s retry_in=%gs error=%s",
                        self.status.name, self._entry.refresh_secs, error,
                    )  # fmt: skip
            else:
                self.status.listed(datetime.now(UTC))
                self._on_change(self.state.answered(addresses, trio.current_time()))
            await trio.sleep(self.state.delay_secs(ttl_secs))


def _import_queries(entry: DiscoverEntry) -> DnsQueries:
    """Imports the DNS library, which few programs need. Blocking."""
    from omni_proxy.discovery_watch.dns_queries import DnsQueries

    return DnsQueries(entry)
