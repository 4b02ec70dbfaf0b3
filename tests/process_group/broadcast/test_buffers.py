import gc
import os
import resource

import pytest

from omni_proxy.process_group.broadcast.buffers import BufferPool, SharedBlockPool
from omni_proxy.process_group.tensor_plan import GroupError


def test_an_unused_block_is_reused():
    buffers = BufferPool()
    block = buffers.take(10_000)
    address = block.data_ptr()
    del block
    assert buffers.take(9_000).data_ptr() == address


def test_the_smallest_block_that_fits_is_taken():
    buffers = BufferPool()
    blocks = [buffers.take(size) for size in (30_000, 10_000, 20_000)]
    address = blocks[2].data_ptr()
    blocks.clear()
    assert buffers.take(15_000).data_ptr() == address


def test_a_view_of_another_dtype_keeps_its_block_in_use():
    import torch

    buffers = BufferPool()
    view = buffers.take(64)[32:].view(torch.float64)
    view.fill_(3.0)
    other = buffers.take(64)
    other.fill_(255)
    assert view.tolist() == [3.0] * 4
    assert buffers.kept_bytes() == 0
    del view
    assert buffers.kept_bytes() == 64


def test_an_empty_block_may_be_viewed_as_any_dtype():
    import torch

    assert BufferPool().take(0).view(torch.int64).shape == (0,)


def test_the_pool_is_bounded_and_evicts_the_oldest_first():
    buffers = BufferPool(keep_bytes=25_000)
    first, second = buffers.take(20_000), buffers.take(10_000)
    del first
    assert buffers.kept_bytes() == 20_000
    del second
    assert buffers.kept_bytes() == 10_000


def test_clear_frees_unused_memory():
    buffers = BufferPool()
    buffers.take(1_000)
    buffers.clear()
    assert buffers.kept_bytes() == 0


def test_a_block_above_free_memory_is_refused_with_both_numbers():
    buffers = BufferPool(free=lambda: 4_096)
    assert buffers.take(4_096).shape == (4_096,)
    with pytest.raises(GroupError, match="need 4097 bytes, but only 4096"):
        buffers.take(4_097)


def test_reused_memory_needs_no_free_memory():
    free = iter([10_000])
    buffers = BufferPool(free=lambda: next(free))
    buffers.take(5_000)
    assert buffers.take(5_000).shape == (5_000,)


def test_unused_blocks_are_freed_before_a_request_is_refused():
    free = iter([10_000, 100, 10_100])
    buffers = BufferPool(free=lambda: next(free))
    buffers.take(5_000)
    assert buffers.take(10_050).shape == (10_050,)
    assert buffers.kept_bytes() == 10_050


def shared_pool(keep_bytes=1 << 20, free=lambda: 1 << 30):
    forgotten = []
    return SharedBlockPool(keep_bytes, forgotten.extend, free), forgotten


def test_a_shared_block_is_reused_only_when_no_view_is_left():
    blocks, _ = shared_pool()
    lease = blocks.take(10_000)
    number = lease.block.number
    tensor = lease.tensor()
    part = tensor[100:200]
    del lease, tensor
    gc.collect()
    assert blocks.kept_bytes() == 0
    other = blocks.take(10_000)
    assert other.block.number != number
    del part
    gc.collect()
    assert blocks.take(9_000).block.number == number


def test_a_shared_block_without_views_returns_with_its_lease():
    blocks, _ = shared_pool()
    lease = blocks.take(100)
    number = lease.block.number
    del lease
    assert blocks.kept_bytes() == 100
    assert blocks.take(50).block.number == number


def test_the_smallest_shared_block_that_fits_is_reused():
    blocks, _ = shared_pool()
    leases = [blocks.take(size) for size in (30_000, 10_000, 20_000)]
    number = leases[2].block.number
    leases.clear()
    assert blocks.take(15_000).block.number == number


def test_bytes_written_through_the_descriptor_are_visible_in_the_tensor():
    blocks, _ = shared_pool()
    lease = blocks.take(8)
    os.pwrite(lease.block.descriptor, b"abcdefgh", 0)
    assert bytes(lease.tensor().tolist()) == b"abcdefgh"


def test_shared_blocks_above_the_limit_are_freed_and_reported():
    blocks, forgotten = shared_pool(keep_bytes=250)
    leases = [blocks.take(size) for size in (100, 100, 100)]
    first = leases[0].block.number
    files = len(os.listdir("/proc/self/fd"))
    while leases:
        leases.pop(0)
    assert blocks.kept_bytes() == 200
    assert forgotten == [first]
    assert len(os.listdir("/proc/self/fd")) == files - 1


def test_a_request_above_free_memory_is_refused_with_the_numbers():
    blocks, _ = shared_pool(free=lambda: 1000)
    with pytest.raises(GroupError, match="need 1001 bytes, but only 1000"):
        blocks.take(1001)
    assert blocks.take(0).block.nbytes == 1  # 0 bytes cannot be mapped


def test_unused_shared_blocks_are_freed_before_a_request_is_refused():
    memory = [1000]
    blocks, forgotten = shared_pool(free=lambda: memory[0] - blocks.kept_bytes())
    number = blocks.take(600).block.number
    assert blocks.take(800).block.nbytes == 800
    assert forgotten == [number]


@pytest.fixture
def no_descriptors():
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.usefixtures("no_descriptors")
def test_a_system_error_is_reported_as_a_lack_of_memory():
    blocks, _ = shared_pool()
    with pytest.raises(GroupError, match="no memory for the announced tensors"):
        blocks.take(100)
