import pytest

from omni_proxy.config.parse import parse
from omni_proxy.discovery.dns_answers import (
    EMPTY_ANSWERS,
    DnsAddress,
    DnsState,
    SrvRecord,
    preferred,
)
from omni_proxy.discovery.endpoints import DiscoveryState

ONE, TWO = DnsAddress("10.0.0.1", 80), DnsAddress("fd00::1", 81, 3)


def state(extra: str = "") -> DnsState:
    return DnsState(parse(f'[[discover]]\nkind = "dns"\ndns_name = "h"\n{extra}').discover[0])


def urls(dns: DnsState) -> dict[str, DiscoveryState]:
    return {endpoint.url: endpoint.state for endpoint in dns.endpoints}


def test_each_address_is_a_worker():
    dns = state('model = "m"')
    dns.answered([ONE, TWO], 0)
    assert urls(dns) == {
        "http://10.0.0.1:80": DiscoveryState.OPEN,
        "http://[fd00::1]:81": DiscoveryState.OPEN,
    }
    assert [(each.found.entry.model, each.found.entry.weight) for each in dns.endpoints] == [
        ("m", 1),
        ("m", 3),
    ]


def test_an_address_that_is_no_longer_in_the_answer_leaves():
    dns = state()
    dns.answered([ONE, TWO], 0)
    (endpoint,) = dns.answered([TWO], 1)
    assert (endpoint.url, endpoint.state) == ("http://10.0.0.1:80", DiscoveryState.LEAVING)


def test_only_the_third_empty_answer_in_a_row_removes_the_workers():
    dns = state()
    dns.answered([ONE], 0)
    for turn in range(EMPTY_ANSWERS - 1):
        assert dns.answered([], turn) == []
    dns.answered([ONE], 5)
    for turn in range(EMPTY_ANSWERS - 1):
        assert dns.answered([], turn) == []
    assert len(dns.answered([], 9)) == 1
    assert urls(dns) == {"http://10.0.0.1:80": DiscoveryState.LEAVING}


def test_a_refused_address_is_a_problem_and_removes_no_worker():
    dns = state()
    dns.answered([ONE], 0)
    for turn in range(EMPTY_ANSWERS + 1):
        dns.answered([DnsAddress("169.254.169.254", 80)], turn)
    assert urls(dns) == {"http://10.0.0.1:80": DiscoveryState.OPEN}
    assert "link-local" in dns.problems["169.254.169.254:80"]


@pytest.mark.parametrize(
    ("refresh", "ttl", "delay"),
    [(10, 3, 3), (10, 0, 1), (10, 60, 10), (0.2, 5, 0.2), (0.2, 0, 0.2)],
)
def test_the_delay_is_the_ttl_within_limits(refresh, ttl, delay):
    assert state(f"refresh_secs = {refresh}").delay_secs(ttl) == delay


def test_the_lowest_priority_is_used_and_weights_are_reduced():
    records = [
        SrvRecord(10, 60, 80, "b."), SrvRecord(10, 30, 80, "a."), SrvRecord(20, 1, 80, "c."),
        SrvRecord(0, 0, 0, "."),
    ]  # fmt: skip
    assert [(each.target, each.weight) for each in preferred(records)] == [("a.", 1), ("b.", 2)]
    assert [
        each.weight for each in preferred([SrvRecord(0, 0, 1, "a."), SrvRecord(0, 0, 1, "b.")])
    ] == [1, 1]
    assert preferred([SrvRecord(0, 0, 0, ".")]) == []
