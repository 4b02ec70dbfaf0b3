import gc
import os
import resource

import pytest

from omni_proxy.process_group.shared_buffers import SharedBlocks
from omni_proxy.process_group.tensor_plan import GroupError


def opened(keep_bytes=1 << 20, free=lambda: 1 << 30):
    forgotten = []
    return SharedBlocks(keep_bytes, forgotten.extend, free), forgotten


def test_a_block_is_handed_out_again_only_when_nobody_looks_into_it():
    blocks, _ = opened()
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


def test_a_block_that_was_never_looked_into_comes_back_with_its_lease():
    blocks, _ = opened()
    lease = blocks.take(100)
    number = lease.block.number
    del lease
    assert blocks.kept_bytes() == 100
    assert blocks.take(50).block.number == number


def test_the_smallest_block_that_fits_is_taken():
    blocks, _ = opened()
    leases = [blocks.take(size) for size in (30_000, 10_000, 20_000)]
    number = leases[2].block.number
    leases.clear()
    assert blocks.take(15_000).block.number == number


def test_what_is_written_through_the_descriptor_is_what_a_tensor_shows():
    blocks, _ = opened()
    lease = blocks.take(8)
    os.pwrite(lease.block.descriptor, b"abcdefgh", 0)
    assert bytes(lease.tensor().tolist()) == b"abcdefgh"


def test_no_more_is_kept_than_allowed_and_children_hear_of_it():
    blocks, forgotten = opened(keep_bytes=250)
    leases = [blocks.take(size) for size in (100, 100, 100)]
    first = leases[0].block.number
    files = len(os.listdir("/proc/self/fd"))
    while leases:
        leases.pop(0)
    assert blocks.kept_bytes() == 200
    assert forgotten == [first]
    assert len(os.listdir("/proc/self/fd")) == files - 1


def test_what_the_machine_has_not_is_refused_with_the_numbers():
    blocks, _ = opened(free=lambda: 1000)
    with pytest.raises(GroupError, match="need 1001 bytes, and there is memory for 1000"):
        blocks.take(1001)
    assert blocks.take(0).block.nbytes == 1  # nothing at all cannot be mapped


def test_what_is_kept_goes_before_anything_is_refused():
    room = [1000]
    blocks, forgotten = opened(free=lambda: room[0] - blocks_kept())

    def blocks_kept():
        return sum(block.nbytes for block in blocks._kept)

    number = blocks.take(600).block.number
    assert blocks.take(800).block.nbytes == 800
    assert forgotten == [number]


@pytest.fixture
def no_descriptors():
    usual = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, usual[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, usual)


@pytest.mark.usefixtures("no_descriptors")
def test_what_the_system_refuses_is_no_memory():
    blocks, _ = opened()
    with pytest.raises(GroupError, match="no memory for the announced tensors"):
        blocks.take(100)
