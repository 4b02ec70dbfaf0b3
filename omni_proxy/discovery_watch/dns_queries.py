"""DNS queries of one `[[discover]]` of kind dns. It imports the DNS library, which is slow.

A host with IPv4 addresses is not queried for IPv6: these would be the same servers, counted twice.
"""

from __future__ import annotations

from typing import Final

import dns.asyncresolver
import dns.exception
import dns.name
import dns.rdatatype
import dns.resolver
import trio
from dns.rdtypes.IN.A import A
from dns.rdtypes.IN.AAAA import AAAA
from dns.rdtypes.IN.SRV import SRV

from omni_proxy.config.tables.discover import DiscoverEntry
from omni_proxy.discovery.dns_answers import (
    NO_TTL,
    DnsAddress,
    DnsFailure,
    SrvRecord,
    preferred,
)
from omni_proxy.upstream_http.resolver import parse_listeners

TRY_SECS: Final = 2.0
QUERY_TIMEOUT_SECS: Final = 5.0
MAX_PARALLEL: Final = 16


class DnsQueries:
    """The queries for one entry."""

    def __init__(self, entry: DiscoverEntry) -> None:
        self._entry = entry
        self._targets: dict[str, tuple[str, ...]] = {}  # last addresses of SRV targets

    async def ask(self) -> tuple[list[DnsAddress], float]:
        """Query; return the addresses and their TTL in seconds. Raises DnsFailure."""
        resolver = await self._resolver()
        if self._entry.is_srv:
            return await self._ask_srv(resolver)
        ips, ttl_secs = await _host_addresses(resolver, self._entry.dns_name)
        assert isinstance(self._entry.port, int)
        return [DnsAddress(ip, self._entry.port) for ip in ips], ttl_secs

    async def _ask_srv(
        self, resolver: dns.asyncresolver.Resolver
    ) -> tuple[list[DnsAddress], float]:
        answer = await _ask(resolver, self._entry.dns_name, dns.rdatatype.SRV)
        if answer is None:
            return [], NO_TTL
        records = preferred(
            SrvRecord(record.priority, record.weight, record.port, record.target.to_text())
            for record in answer
            if isinstance(record, SRV)
        )
        known, ttls = _additional(answer)
        ttls.append(float(answer.chaining_result.minimum_ttl))
        targets = list(dict.fromkeys(record.target for record in records))
        resolved = {target: known[target] for target in targets if target in known}
        limiter = trio.CapacityLimiter(MAX_PARALLEL)

        async def resolve(target: str) -> None:
            async with limiter:
                try:
                    resolved[target], ttl = await _host_addresses(resolver, target)
                    ttls.append(ttl)
                except DnsFailure:
                    if target not in self._targets:
                        raise
                    resolved[target] = self._targets[target]

        try:
            async with trio.open_nursery() as nursery:
                for target in targets:
                    if target not in resolved:
                        nursery.start_soon(resolve, target)
        except* DnsFailure as errors:
            raise DnsFailure(str(errors.exceptions[0])) from None
        self._targets = resolved
        addresses = [
            DnsAddress(ip, record.port, record.weight)
            for record in records
            for ip in resolved[record.target]
        ]
        return addresses, min(ttls)

    async def _resolver(self) -> dns.asyncresolver.Resolver:
        """A resolver for one query, because resolv.conf may change. Raises DnsFailure."""
        server = self._entry.dns_server
        try:
            if not server:
                resolver = await trio.to_thread.run_sync(dns.asyncresolver.Resolver)
            else:
                resolver = dns.asyncresolver.Resolver(configure=False)
                ((host, port),) = parse_listeners([server])
                addresses = await trio.socket.getaddrinfo(host, port, type=trio.socket.SOCK_DGRAM)
                resolver.nameservers = [str(addresses[0][4][0])]
                resolver.port = port
        except (dns.exception.DNSException, OSError) as error:
            raise DnsFailure(f"no DNS server: {error}") from None
        resolver.timeout, resolver.lifetime = TRY_SECS, QUERY_TIMEOUT_SECS
        return resolver


async def _host_addresses(
    resolver: dns.asyncresolver.Resolver, name: str
) -> tuple[tuple[str, ...], float]:
    """IPv4 addresses, or IPv6 ones if there are none, and their TTL in seconds.

    Raises DnsFailure.
    """
    for kind in (dns.rdatatype.A, dns.rdatatype.AAAA):
        answer = await _ask(resolver, name, kind)
        if answer is not None:
            ips = sorted(record.address for record in answer if isinstance(record, A | AAAA))
            return tuple(ips), float(answer.chaining_result.minimum_ttl)
    return (), NO_TTL


async def _ask(
    resolver: dns.asyncresolver.Resolver, name: str, kind: dns.rdatatype.RdataType
) -> dns.resolver.Answer | None:
    """Query; None if the name or records of this kind don't exist. Raises DnsFailure."""
    try:
        return await resolver.resolve(name, kind, search=bool(resolver.search))
    except (dns.resolver.NXDOMAIN, dns.resolver.NoAnswer):
        return None
    except (dns.exception.DNSException, OSError) as error:
        raise DnsFailure(f"{name} {kind.name}: {str(error) or type(error).__name__}") from None


def _additional(answer: dns.resolver.Answer) -> tuple[dict[str, tuple[str, ...]], list[float]]:
    """IPv4 addresses by name from the additional section, and their TTLs in seconds.

    These names need no further query.
    """
    ips_by_name: dict[str, tuple[str, ...]] = {}
    ttls: list[float] = []
    for rrset in answer.response.additional:
        if rrset.rdtype == dns.rdatatype.A:
            ips = tuple(sorted(record.address for record in rrset if isinstance(record, A)))
            ips_by_name[rrset.name.to_text()] = ips
            ttls.append(float(rrset.ttl))
    return ips_by_name, ttls
