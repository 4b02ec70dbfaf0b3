import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from omni_proxy.replica.models import tiny
from omni_proxy.replica.tp import group as module
from omni_proxy.replica.tp.group import RankGroup, RankLost, join_store, open_store
from omni_proxy.replica.tp.sharded_model import Shard, ShardedLlama


class Ranks:
    """All ranks of a group, each in its own thread."""

    def __init__(self, size, lost=lambda: ""):
        self.groups = [RankGroup(rank, size, lost) for rank in range(size)]
        self.threads = ThreadPoolExecutor(size)
        store, port = open_store(size)
        stores = [store, *(join_store(port, size) for _ in range(1, size))]
        self.each(lambda rank: self.groups[rank].join(stores[rank]))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.threads.shutdown()
        for group in self.groups:
            group.close()

    def each(self, do):
        return list(self.threads.map(do, range(len(self.groups))))


@pytest.fixture(scope="module")
def two():
    with Ranks(2) as ranks:
        yield ranks


def test_a_sum_is_the_same_at_every_rank(two):
    tensors = [torch.tensor([1.0, 2.0]), torch.tensor([0.5, 40.0])]
    sums = two.each(lambda rank: two.groups[rank].add_up(tensors[rank]))
    for given, total in zip(tensors, sums, strict=True):
        assert total is given
        assert total.tolist() == [1.5, 42.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64])
def test_tensors_of_any_type_are_gathered_at_the_first(two, dtype):
    sent = [torch.full((3, 2), rank + 1.0).to(dtype).t() for rank in range(2)]
    first, second = two.each(lambda rank: two.groups[rank].gather(sent[rank]))
    assert second == []
    assert [each.float().tolist() for each in first] == [each.float().tolist() for each in sent]
    assert {each.dtype for each in first} == {dtype}


def test_nothing_listens_but_on_loopback():
    store, port = open_store(2)
    others = [row[4][0] for row in socket.getaddrinfo(socket.gethostname(), port)]
    for host in {"127.0.0.2", "::1", *others} - {"127.0.0.1"}:
        with pytest.raises(OSError), socket.create_connection((host, port), timeout=2):
            pass
    del store


def test_a_peer_that_is_known_to_be_lost_is_not_waited_for():
    reason = []
    with Ranks(2, lambda: "".join(reason)) as ranks:
        reason.append("rank 1 is gone")
        with pytest.raises(RankLost, match="rank 1 is gone"):
            ranks.groups[0].add_up(torch.ones(1))
        assert ranks.groups[0].broken == "rank 1 is gone"
        # The sum itself still runs: it was abandoned, not awaited.
        assert ranks.groups[1].add_up(torch.ones(1)).item() == 2


def test_a_peer_that_parts_is_noticed_and_breaks_the_group():
    with Ranks(2) as ranks:
        ranks.groups[1].close()
        with pytest.raises(RankLost, match="rank 0 received no data"):
            ranks.groups[0].add_up(torch.ones(1))
        assert ranks.groups[0].broken
        with pytest.raises(RankLost, match="have not connected, or have left"):
            ranks.groups[1].add_up(torch.ones(1))


def test_a_missing_rank_is_reported(monkeypatch):
    monkeypatch.setattr(module, "RENDEZVOUS_SECS", 0.2)
    monkeypatch.setattr(module, "STEP_SECS", 0.2)
    store, _ = open_store(2)
    with pytest.raises(RankLost, match="the 2 ranks did not connect"):
        RankGroup(0, 2).join(store)


@pytest.mark.parametrize("size", [2, 4])
def test_the_parts_together_compute_what_the_whole_computes(size):
    whole = tiny.build(3)
    with Ranks(size) as ranks:
        models = [
            ShardedLlama(whole, Shard(tiny.CONFIG, group.rank, size), group.add_up)
            for group in ranks.groups
        ]
        prompts = [[300, 301, 302], [400], [260 + n for n in range(70)]]

        def compute(rank):
            model = models[rank]
            kvs = [model.new_kv() for _ in prompts]
            outs = []
            for tail in ([], [5], [6, 7]):
                parts = [(tail or prompt, kv) for prompt, kv in zip(prompts, kvs, strict=True)]
                outs.append(model.follow(parts) if rank else model(parts))
            return [kv.length for kv in kvs], outs

        results = ranks.each(compute)
    kvs = [whole.new_kv() for _ in prompts]
    for index, tail in enumerate(([], [5], [6, 7])):
        expected = whole([(tail or prompt, kv) for prompt, kv in zip(prompts, kvs, strict=True)])
        assert torch.allclose(results[0][1][index], expected, rtol=1e-3, atol=1e-3)
    assert {tuple(lengths) for lengths, _ in results} == {tuple(kv.length for kv in kvs)}
