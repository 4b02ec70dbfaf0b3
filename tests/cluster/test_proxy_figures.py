from omni_proxy.cluster.messages import FiguresMessage, decode, encode
from omni_proxy.cluster.proxy_figures import (
    MAX_WORKERS,
    PARTS,
    CountedFigures,
    PeerFigures,
    ProxyFigures,
    WorkerFigures,
)


def figures(part=0, workers=None, waiting=0):
    return ProxyFigures(
        "1.0", 5.0, "", waiting, 0.1, 2.0, 0, None, part, workers or {}, CountedFigures()
    )


def test_a_message_arrives_as_it_was_sent():
    sent = FiguresMessage("a/1", figures(workers={5: WorkerFigures(1.5, 2, 30.0)}))
    assert decode(encode(sent)) == sent


def test_a_worker_has_the_sum_over_the_other_proxies():
    peers = PeerFigures()
    peers.take("a", figures(workers={PARTS: WorkerFigures(1.0, 1, 10.0)}, waiting=2))
    peers.take("b", figures(workers={PARTS: WorkerFigures(0.5, 0, 5.0)}, waiting=1))
    assert (peers.peer_figures(PARTS), peers.waiting) == (WorkerFigures(1.5, 1, 15.0), 3)
    assert peers.peer_figures(1) == WorkerFigures()


def test_a_message_with_a_part_of_the_workers_replaces_that_part_only():
    peers = PeerFigures()
    peers.take("a", figures(0, {PARTS: WorkerFigures(1.0)}))
    peers.take("a", figures(1, {1: WorkerFigures(2.0)}))
    assert peers.peer_figures(PARTS) == WorkerFigures(1.0)
    peers.take("a", figures(0))
    assert peers.peer_figures(PARTS) == WorkerFigures()
    assert peers.peer_figures(1) == WorkerFigures(2.0)


def test_too_many_workers_are_ignored_and_members_that_left_are_dropped():
    peers = PeerFigures()
    many = {at * PARTS: WorkerFigures(1.0) for at in range(MAX_WORKERS + 1)}
    peers.take("a", figures(0, many))
    peers.take("a", figures(PARTS, {PARTS: WorkerFigures(1.0)}))
    assert peers.peer_figures(PARTS) == WorkerFigures()
    peers.take("b", figures(0, {PARTS: WorkerFigures(1.0)}))
    peers.keep(["a"])
    assert (peers.of("b"), peers.peer_figures(PARTS)) == (None, WorkerFigures())
