import pytest

from omni_proxy.process_group.buffers import Buffers, free_bytes
from omni_proxy.process_group.tensor_plan import GroupError


def test_what_nobody_looks_into_is_handed_out_again():
    buffers = Buffers()
    block = buffers.take(10_000)
    place = block.data_ptr()
    del block
    assert buffers.take(9_000).data_ptr() == place


def test_the_smallest_block_that_fits_is_taken():
    buffers = Buffers()
    blocks = [buffers.take(size) for size in (30_000, 10_000, 20_000)]
    place = blocks[2].data_ptr()
    blocks.clear()
    assert buffers.take(15_000).data_ptr() == place


def test_a_view_of_another_dtype_holds_the_memory():
    import torch

    buffers = Buffers()
    view = buffers.take(64)[32:].view(torch.float64)
    view.fill_(3.0)
    other = buffers.take(64)
    other.fill_(255)
    assert view.tolist() == [3.0] * 4
    assert buffers.kept_bytes() == 0
    del view
    assert buffers.kept_bytes() == 64


def test_an_empty_block_may_be_viewed_as_anything():
    import torch

    assert Buffers().take(0).view(torch.int64).shape == (0,)


def test_no_more_than_allowed_is_kept_and_the_oldest_goes_first():
    buffers = Buffers(keep_bytes=25_000)
    first, second = buffers.take(20_000), buffers.take(10_000)
    del first
    assert buffers.kept_bytes() == 20_000
    del second
    assert buffers.kept_bytes() == 10_000


def test_what_is_kept_can_be_given_back():
    buffers = Buffers()
    buffers.take(1_000)
    buffers.clear()
    assert buffers.kept_bytes() == 0


def test_more_than_there_is_is_refused_with_both_numbers():
    buffers = Buffers(free=lambda: 4_096)
    assert buffers.take(4_096).shape == (4_096,)
    with pytest.raises(GroupError, match="need 4097 bytes, and there is memory for 4096"):
        buffers.take(4_097)


def test_memory_that_is_kept_needs_no_free_memory():
    free = iter([10_000])
    buffers = Buffers(free=lambda: next(free))
    buffers.take(5_000)
    assert buffers.take(5_000).shape == (5_000,)


def test_what_is_kept_goes_before_anything_is_refused():
    free = iter([10_000, 100, 10_100])
    buffers = Buffers(free=lambda: next(free))
    buffers.take(5_000)
    assert buffers.take(10_050).shape == (10_050,)
    assert buffers.kept_bytes() == 10_050


def test_free_memory_is_a_number_the_machine_could_have():
    assert 1 << 20 < free_bytes() < 1 << 50
