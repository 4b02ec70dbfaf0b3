import sys
import threading

import dns.rcode
import pytest
import trio

from omni_proxy.config.parse import parse
from omni_proxy.discovery_watch import dns_queries
from omni_proxy.discovery_watch.dns_queries import DnsQueries
from omni_proxy.discovery_watch.dns_watcher import DnsWatcher
from tests.discovery_watch.dns_server import DnsServer

SRV = "_http._tcp.engines.test"


@pytest.fixture
async def server(nursery):
    dns_server = DnsServer()
    await nursery.start(dns_server.serve)
    return dns_server


class Watched:
    """A running watcher; `found` are its endpoints."""

    def __init__(self, server, name, more=""):
        text = f'[[discover]]\nkind = "dns"\ndns_name = "{name}"\nrefresh_secs = 0.05\n'
        self.entry = parse(f'{text}dns_server = "{server.address}"\n{more}').discover[0]
        self.watcher = DnsWatcher(self.entry, lambda changed: None)
        self.server = server

    def found(self):
        return {
            endpoint.url.removeprefix("http://"): endpoint.state.value
            for endpoint in self.watcher.state.endpoints
        }

    async def until(self, expected):
        with trio.fail_after(20):
            while self.found() != expected:  # noqa: ASYNC110  another task watches
                await trio.sleep(0.01)

    async def wait_rounds(self, times=1):
        """Waits until this many more rounds of queries have ended."""
        status = self.watcher.status
        target = status.lists + status.failures + times
        with trio.fail_after(20):
            while status.lists + status.failures < target:  # noqa: ASYNC110
                await trio.sleep(0.01)


@pytest.fixture
def watching(server, nursery):
    def start(name, more=""):
        watched = Watched(server, name, more)
        nursery.start_soon(watched.watcher.run)
        return watched

    return start


async def test_each_address_of_a_host_is_a_worker(server, watching):
    server.put("engines.test", "A", "10.0.0.1", "10.0.0.2")
    watched = watching("engines.test", "port = 8000")
    await watched.until({"10.0.0.1:8000": "open", "10.0.0.2:8000": "open"})
    server.put("engines.test", "A", "10.0.0.2")
    await watched.until({"10.0.0.1:8000": "leaving", "10.0.0.2:8000": "open"})


async def test_ipv6_addresses_are_used_if_there_are_no_ipv4_addresses(server, watching):
    server.put("six.test", "AAAA", "fd00::1")
    server.put("both.test", "A", "10.0.0.1")
    server.put("both.test", "AAAA", "fd00::1")
    await watching("six.test").until({"[fd00::1]:30000": "open"})
    both = watching("both.test")
    await both.until({"10.0.0.1:30000": "open"})
    assert ("both.test", "AAAA") not in server.questions


async def test_srv_records_name_hosts_and_ports(server, watching):
    server.put(SRV, "SRV", "0 50 8001 a.test.", "0 50 8002 b.test.", "9 1 8003 c.test.")
    server.put("a.test", "A", "10.0.0.1")
    server.additional.append(("b.test", 1, "10.0.0.2"))
    watched = watching(SRV)
    await watched.until({"10.0.0.1:8001": "open", "10.0.0.2:8002": "open"})
    assert ("b.test", "A") not in server.questions  # the SRV response included its address


async def test_a_target_that_cannot_be_resolved_keeps_its_address(server, watching):
    server.put(SRV, "SRV", "0 1 8001 a.test.", "0 1 8002 b.test.")
    server.put("a.test", "A", "10.0.0.1")
    server.put("b.test", "A", "10.0.0.2")
    watched = watching(SRV)
    await watched.until({"10.0.0.1:8001": "open", "10.0.0.2:8002": "open"})
    server.rcodes["a.test"] = dns.rcode.SERVFAIL
    server.put("b.test", "A", "10.0.0.3")
    await watched.until(
        {"10.0.0.1:8001": "open", "10.0.0.2:8002": "leaving", "10.0.0.3:8002": "open"}
    )


@pytest.mark.parametrize("rcode", [dns.rcode.SERVFAIL, dns.rcode.REFUSED])
async def test_a_failure_of_any_length_keeps_the_last_answer(server, watching, rcode):
    server.put("engines.test", "A", "10.0.0.1")
    watched = watching("engines.test")
    await watched.until({"10.0.0.1:30000": "open"})
    server.rcodes["engines.test"] = rcode
    await watched.wait_rounds(5)
    assert watched.found() == {"10.0.0.1:30000": "open"}
    assert (watched.watcher.status.state, watched.watcher.status.error[:14]) == (
        "stale",
        "engines.test A",
    )
    server.rcodes.clear()
    await watched.wait_rounds(2)
    assert (watched.watcher.status.state, watched.watcher.status.error) == ("synced", "")


@pytest.mark.parametrize(
    "vanish", [dict.clear, lambda zone: zone.update({("engines.test", "A"): (1, [])})]
)
async def test_three_empty_answers_in_a_row_remove_the_workers(server, watching, vanish):
    server.put("engines.test", "A", "10.0.0.1")
    watched = watching("engines.test")
    await watched.until({"10.0.0.1:30000": "open"})
    vanish(server.zone)
    await watched.wait_rounds(1)
    assert watched.found() == {"10.0.0.1:30000": "open"}
    await watched.until({"10.0.0.1:30000": "leaving"})


async def test_a_truncated_answer_is_requested_over_tcp(server, watching):
    server.truncated = True
    server.put("engines.test", "A", *(f"10.0.1.{n}" for n in range(200)))
    watched = watching("engines.test")
    await watched.until({f"10.0.1.{n}:30000": "open" for n in range(200)})


async def test_a_silent_server_is_a_failure_until_it_answers(server, watching, monkeypatch):
    monkeypatch.setattr(dns_queries, "TRY_SECS", 0.05)
    monkeypatch.setattr(dns_queries, "QUERY_TIMEOUT_SECS", 0.1)
    server.put("engines.test", "A", "10.0.0.1")
    watched = watching("engines.test")
    await watched.until({"10.0.0.1:30000": "open"})
    server.silent = True
    server.put("engines.test", "A", "10.0.0.2")
    await watched.wait_rounds(3)
    assert watched.found() == {"10.0.0.1:30000": "open"}
    assert watched.watcher.status.state == "stale"
    server.silent = False
    await watched.until({"10.0.0.1:30000": "leaving", "10.0.0.2:30000": "open"})


async def test_a_chain_of_cnames_is_followed(server, watching):
    server.put("engines.test", "CNAME", "blue.test.", ttl=300)
    server.put("blue.test", "CNAME", "pool.test.", ttl=300)
    server.put("pool.test", "A", "10.0.0.1", "10.0.0.2", ttl=300)
    watched = watching("engines.test", "port = 8000")
    await watched.until({"10.0.0.1:8000": "open", "10.0.0.2:8000": "open"})
    server.put("green.test", "A", "10.0.0.3")
    server.put("engines.test", "CNAME", "green.test.")
    await watched.until(
        {"10.0.0.1:8000": "leaving", "10.0.0.2:8000": "leaving", "10.0.0.3:8000": "open"}
    )


async def test_a_loop_of_cnames_is_a_failure(server, watching):
    server.put("engines.test", "A", "10.0.0.1")
    watched = watching("engines.test")
    await watched.until({"10.0.0.1:30000": "open"})
    server.zone.clear()
    server.put("engines.test", "CNAME", "pool.test.")
    server.put("pool.test", "CNAME", "engines.test.")
    await watched.wait_rounds(4)
    assert watched.found() == {"10.0.0.1:30000": "open"}
    assert watched.watcher.status.state == "stale"


async def test_another_port_of_an_srv_record_is_another_worker(server, watching):
    server.put("a.test", "A", "10.0.0.1")
    server.put(SRV, "SRV", "0 1 8001 a.test.")
    watched = watching(SRV)
    await watched.until({"10.0.0.1:8001": "open"})
    server.put(SRV, "SRV", "0 1 8002 a.test.")
    await watched.until({"10.0.0.1:8001": "leaving", "10.0.0.1:8002": "open"})


async def test_the_shortest_ttl_of_a_chain_counts(server):
    server.put("engines.test", "CNAME", "pool.test.", ttl=0)
    server.put("pool.test", "A", "10.0.0.1", ttl=300)
    _, ttl_secs = await DnsQueries(Watched(server, "engines.test").entry).ask()
    assert ttl_secs == 0


async def test_a_server_that_cannot_be_resolved_is_a_failure(server, watching):
    text = '[[discover]]\nkind = "dns"\ndns_name = "h"\ndns_server = "no-such-host.invalid:53"\n'
    watcher = DnsWatcher(parse(text).discover[0], lambda changed: None)
    with trio.move_on_after(20) as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watcher.run)
            while not watcher.status.error:  # noqa: ASYNC110
                await trio.sleep(0.01)
            nursery.cancel_scope.cancel()
    assert not scope.cancelled_caught
    assert watcher.status.state == "failing"


class ImportThreads:
    """A finder that finds nothing; `of`: the thread of the first import of each module."""

    def __init__(self):
        self.of = {}

    def find_spec(self, name, path=None, target=None):
        self.of.setdefault(name, threading.current_thread())


async def test_the_dns_library_is_imported_in_a_thread(server, watching, monkeypatch):
    """A reload that adds the first source of this kind must not stop the event loop."""
    finder = ImportThreads()
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    monkeypatch.delitem(sys.modules, dns_queries.__name__)
    server.put("engines.test", "A", "10.0.0.1")
    await watching("engines.test").until({"10.0.0.1:30000": "open"})
    assert finder.of[dns_queries.__name__] is not threading.main_thread()
