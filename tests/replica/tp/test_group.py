import socket
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from omni_proxy.replica.models import tiny
from omni_proxy.replica.models.shard import Shard
from omni_proxy.replica.tp import group as module
from omni_proxy.replica.tp import sharded_model
from omni_proxy.replica.tp.group import RankGroup, RankLost, join_store, open_store
from omni_proxy.replica.tp.sharded_model import RankWorker, ShardedLlama


class Ranks:
    """All ranks of a group, each in its own thread."""

    def __init__(self, size, lost=lambda: ""):
        self.groups = [RankGroup(rank, size, lost) for rank in range(size)]
        self.threads = ThreadPoolExecutor(size)
        store, port = open_store(size)
        stores = [store, *(join_store(port, size) for _ in range(1, size))]
        self.run(lambda rank: self.groups[rank].join(stores[rank]))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.threads.shutdown()
        for group in self.groups:
            group.close()

    def run(self, do):
        return list(self.threads.map(do, range(len(self.groups))))


@pytest.fixture(scope="module")
def two_ranks():
    with Ranks(2) as ranks:
        yield ranks


def test_a_sum_is_the_same_at_every_rank(two_ranks):
    tensors = [torch.tensor([1.0, 2.0]), torch.tensor([0.5, 40.0])]
    sums = two_ranks.run(lambda rank: two_ranks.groups[rank].add_up(tensors[rank]))
    for tensor, total in zip(tensors, sums, strict=True):
        assert total is tensor
        assert total.tolist() == [1.5, 42.0]


DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64]
TENSORS = [torch.arange(1.0, 7.0).view(3, 2).t().to(dtype) for dtype in DTYPES]
ODD = [torch.tensor(3.0), torch.ones(3, dtype=torch.bool), torch.empty(0, 3), *TENSORS]


@pytest.mark.parametrize("tensors", [*([each] for each in TENSORS), ODD])
def test_tensors_of_any_dtype_and_shape_are_gathered_at_rank_0(two_ranks, tensors):
    sent = [tensors, [torch.zeros_like(each) for each in tensors]]
    first, second = two_ranks.run(lambda rank: two_ranks.groups[rank].gather(sent[rank]))
    assert second == []
    for parts, expected in zip(first, zip(*sent, strict=True), strict=True):
        for part, tensor in zip(parts, expected, strict=True):
            assert (part.dtype, part.float().tolist()) == (tensor.dtype, tensor.float().tolist())
            assert part.shape == tensor.shape


def test_the_store_listens_on_loopback_only():
    store, port = open_store(2)
    addresses = [row[4][0] for row in socket.getaddrinfo(socket.gethostname(), port)]
    for host in {"127.0.0.2", "::1", *addresses} - {"127.0.0.1"}:
        with pytest.raises(OSError), socket.create_connection((host, port), timeout=2):
            pass
    del store


def test_a_rank_does_not_wait_for_a_lost_peer():
    reasons = []
    with Ranks(2, lambda: "".join(reasons)) as ranks:
        reasons.append("rank 1 is gone")
        with pytest.raises(RankLost, match="rank 1 is gone"):
            ranks.groups[0].add_up(torch.ones(1))
        assert ranks.groups[0].broken == "rank 1 is gone"
        # Rank 0 has abandoned its sum, but the operation still runs.
        assert ranks.groups[1].add_up(torch.ones(1)).item() == 2


def test_a_rank_that_closes_its_group_breaks_the_group_for_all():
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
def test_the_shards_together_compute_what_the_whole_model_computes(size):
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
            logits = []
            for tail in ([], [5], [6, 7]):
                batch = [(tail or prompt, kv) for prompt, kv in zip(prompts, kvs, strict=True)]
                logits.append(model.follow(batch) if rank else model(batch))
            return [kv.length for kv in kvs], logits

        results = ranks.run(compute)
    kvs = [whole.new_kv() for _ in prompts]
    for index, tail in enumerate(([], [5], [6, 7])):
        expected = whole([(tail or prompt, kv) for prompt, kv in zip(prompts, kvs, strict=True)])
        assert torch.allclose(results[0][1][index], expected, rtol=1e-3, atol=1e-3)
    assert {tuple(lengths) for lengths, _ in results} == {tuple(kv.length for kv in kvs)}


@pytest.mark.parametrize(("limit", "gathers"), [(1, 28), (100_000, 16), (1 << 20, 2), (4 << 20, 1)])
def test_whole_tensors_are_gathered_in_groups_of_limited_size(
    two_ranks, monkeypatch, limit, gathers
):
    monkeypatch.setattr(sharded_model, "GATHER_BYTES", limit)
    whole, sizes = tiny.build(3), []
    gather = RankGroup.gather

    def record(group, tensors):
        if group.rank == 0:
            sizes.append([tensor.nbytes for tensor in tensors])
        return gather(group, tensors)

    monkeypatch.setattr(RankGroup, "gather", record)

    def collect(rank):
        group = two_ranks.groups[rank]
        model = ShardedLlama(whole, Shard(tiny.CONFIG, rank, 2), group.add_up)
        worker = RankWorker(SimpleNamespace(model=model), group)
        return [*worker.whole_tensors(model.named_parameters())]

    first, second = two_ranks.run(collect)
    found = {name: tensor for group in first for name, tensor in group.items()}
    assert {name: tensor.tolist() for name, tensor in found.items()} == {
        name: tensor.tolist() for name, tensor in whole.named_parameters()
    }
    assert second == [{}] * len(first)
    assert len(sizes) == gathers
    assert all(len(each) == 1 or sum(each) <= limit for each in sizes)
