"""Counts of other proxies in the history of the cluster."""

from dataclasses import fields

from omni_proxy.cluster.messages import FiguresMessage
from omni_proxy.cluster.proxy_figures import CountedFigures, ProxyFigures
from omni_proxy.cluster_member.figures import SharedFigures
from omni_proxy.telemetry.histogram import FINE
from omni_proxy.telemetry.history import Bin, History

AT = 9000.0


class Source:
    def __init__(self) -> None:
        self.history = History()

    def read(self, part: int, local_host: str) -> ProxyFigures:
        raise NotImplementedError


def figures(counted: CountedFigures) -> ProxyFigures:
    return ProxyFigures("1", 0.0, "", 0, 0.0, 0.0, 0, None, 0, {}, counted)


def test_counts_are_sent_with_the_names_of_the_history():
    names = set(CountedFigures.__struct_fields__)
    assert names < {field.name for field in fields(Bin)}


def test_only_counts_of_known_members_are_added(monkeypatch):
    monkeypatch.setattr("omni_proxy.cluster_member.figures.time.time", lambda: AT)
    source = Source()
    source.history.follow_cluster(member=True)
    source.history.end_second(AT, (1, 0, ()), 0, 0)
    shared = SharedFigures(source)
    counted = CountedFigures(requests=6, errors=2, firsts={3: 1, len(FINE) + 1: 4})
    for member in ("b", "unknown"):
        shared.take(FiguresMessage(member, figures(counted)), ["b"])
    cluster = source.history.cluster
    assert cluster is not None
    assert cluster.read(900, "requests_per_sec", AT)[-1] == 7
    assert cluster.read(900, "errors_per_sec", AT)[-1] == 2
    assert source.history.fleet.read(900, "requests_per_sec", AT)[-1] == 1
