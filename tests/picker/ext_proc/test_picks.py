import pytest
import trio

pytest.importorskip("google.protobuf", reason="the extra `picker` is not installed")

from omni_proxy.picker.ext_proc.messages import Destination
from omni_proxy.picker.ext_proc.picks import EnvoyPicks, ResponseFacts, Ticket
from omni_proxy.picker.ext_proc.stream import ProxiedRequest
from omni_proxy.routing.inspect.large_json import ONE_PASS_BYTES
from tests.fleet.entries import NOW, entry
from tests.idle import wait_until_idle
from tests.picker.conftest import picker_over

HEADERS = {":method": "POST", ":path": "/v1/chat/completions", "content-type": "application/json"}
A, B = "127.0.0.1", "127.0.0.2"


class Envoy:
    def __init__(self, fixture, nursery):
        self.fixture = fixture
        self.picks = EnvoyPicks(fixture.picker, fixture.dataplane.services, nursery)
        self.answers = []

    def begin(self, body=b'{"messages": []}', subset=None, **headers):
        ticket = Ticket()
        envoy_request = ProxiedRequest({**HEADERS, **headers}, body, subset)
        self.picks.begin(ticket, envoy_request, self.answers.append)
        return ticket


@pytest.fixture
async def envoy(nursery):
    return Envoy(picker_over(entry(A), entry(B)), nursery)


async def test_a_request_is_counted_once_from_its_pick_until_its_end(envoy):
    ticket = envoy.begin()
    (destination,) = envoy.answers
    assert destination.endpoint in (f"{A}:1", f"{B}:1")
    assert sum(envoy.fixture.counts) == envoy.fixture.dataplane.in_flight == 1
    for _ in range(2):
        envoy.picks.end(ticket, ResponseFacts(status=200, complete=True))
    assert envoy.fixture.counts == [0, 0]
    ended = envoy.fixture.dataplane.services.totals.ended
    assert (envoy.fixture.dataplane.in_flight, ended["completed"]) == (0, 1)


async def test_an_exception_at_the_end_of_a_request_is_logged(envoy, monkeypatch, caplog):
    ticket = envoy.begin()

    def fail(*_):
        raise OverflowError("too large")

    monkeypatch.setattr(envoy.fixture.picker, "end_prefill", fail)
    envoy.picks.begin_response(ticket)
    envoy.picks.end(ticket, ResponseFacts(status=200, complete=True))
    assert caplog.messages == ["pick_prefill_end_failed", "pick_end_failed"]


async def test_a_refusal_is_counted_only_as_refused(envoy):
    envoy.begin(b'{"model": "x", "messages": []}', subset=frozenset())
    (error,) = envoy.answers
    assert (error.status, error.code) == (503, "subset_unavailable")
    assert envoy.fixture.dataplane.in_flight == 0
    assert envoy.fixture.dataplane.services.totals.ended["refused"] == 1


async def test_endpoints_of_removed_workers_are_dropped(envoy):
    envoy.begin(subset=frozenset((f"{A}:1", f"{B}:1")))
    assert len(envoy.picks.endpoints) == 2
    envoy.fixture.dataplane.services.fleet.apply([entry(A)], NOW)
    envoy.begin()
    assert len(envoy.picks.endpoints) == 1


async def test_only_workers_of_the_subset_are_picked(envoy):
    for _ in range(4):
        envoy.begin(subset=frozenset((f"{B}:1", "10.9.9.9:1")))
    assert {destination.endpoint for destination in envoy.answers} == {f"{B}:1"}
    assert envoy.fixture.counts == [0, 4]


async def test_a_request_that_ends_before_the_pick_of_its_large_body_leaves_no_count(envoy):
    ticket = envoy.begin(b'{"messages": [], "x": "' + b"y" * ONE_PASS_BYTES + b'"}')
    assert envoy.answers == []
    envoy.picks.end(ticket, ResponseFacts())
    await wait_until_idle()
    assert envoy.fixture.counts == [0, 0]


async def test_502_and_504_count_against_the_worker_and_503_does_not(envoy):
    for status in (503, 502, 504):
        ticket = envoy.begin(subset=frozenset((f"{A}:1",)))
        envoy.picks.end(ticket, ResponseFacts(status=status, complete=True))
    assert envoy.fixture.fleet.workers[0].health.failed_requests == 2


async def test_a_worker_with_its_own_key_or_a_rank_gets_their_headers(nursery, monkeypatch):
    monkeypatch.setenv("WORKER_KEY", "k3y")
    envoy = Envoy(picker_over(entry(A, api_key_env="WORKER_KEY", ranks=2)), nursery)
    envoy.begin()
    (destination,) = envoy.answers
    assert destination.headers == {"x-data-parallel-rank": "0", "authorization": "Bearer k3y"}
    assert "x-api-key" in destination.removed  # it may be the client's key for the proxy


async def test_a_host_name_is_resolved_and_one_without_an_address_is_503(nursery, monkeypatch):
    async def getaddrinfo(host, port, **_):
        if host == "b":
            raise OSError("no such name")
        return [(0, 0, 0, "", ("10.1.2.3", port))]

    monkeypatch.setattr(trio.socket, "getaddrinfo", getaddrinfo)
    envoy = Envoy(picker_over(entry("a"), entry("b")), nursery)
    for _ in range(2):
        envoy.begin()
        await wait_until_idle()
    good, bad = sorted(envoy.answers, key=lambda each: not isinstance(each, Destination))
    assert (good.endpoint, bad.code) == ("10.1.2.3:1", "worker_unresolved")
    assert envoy.fixture.counts == [1, 0]


async def test_a_head_that_would_not_be_relayed_is_refused(envoy):
    envoy.begin(**{"x y": "z"})
    assert envoy.answers[0].status == 400


@pytest.fixture
async def pools(nursery):
    """A prefill worker, A, and a decode worker, B."""
    common = {"kv_connector": "nixl"}
    entries = entry(A, role="prefill", **common), entry(B, role="decode", **common)
    return Envoy(picker_over(*entries), nursery)


async def test_a_header_names_the_prefill_worker_and_both_workers_are_counted(pools):
    ticket = pools.begin()
    (destination,) = pools.answers
    assert (destination.endpoint, destination.headers) == (
        f"{B}:1",
        {"x-prefiller-host-port": f"{A}:1"},
    )
    assert pools.fixture.counts == [1, 1]
    for _ in range(2):
        pools.picks.begin_response(ticket)
        assert pools.fixture.counts == [0, 1]
    pools.picks.end(ticket, ResponseFacts(status=200, complete=True))
    assert pools.fixture.counts == [0, 0]


@pytest.mark.parametrize("facts", [ResponseFacts(), ResponseFacts(status=200, complete=True)])
async def test_the_end_of_a_request_releases_its_prefill_worker(pools, facts):
    pools.picks.end(pools.begin(), facts)
    assert pools.fixture.counts == [0, 0]


async def test_without_a_prefill_worker_the_clients_header_is_removed(envoy):
    envoy.begin(**{"x-prefiller-host-port": "169.254.169.254:80"})
    (destination,) = envoy.answers
    assert (destination.headers, destination.removed) == ({}, ("x-prefiller-host-port",))


async def test_a_prefill_worker_without_an_address_leads_to_a_refusal(nursery):
    entries = (
        entry(A, role="prefill", kv_connector="nixl"),
        entry(B, role="decode", kv_connector="nixl"),
    )
    envoy = Envoy(picker_over(*entries), nursery)
    prefill = envoy.fixture.fleet.workers[0]
    envoy.picks.endpoints._found[prefill.address] = (float("inf"), ())
    envoy.begin()
    (error,) = envoy.answers
    assert (error.code, envoy.fixture.counts) == ("worker_unresolved", [0, 0])
