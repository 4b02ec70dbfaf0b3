import pytest

from omni_proxy.launch.gpu_allocator import GpuAllocator, TooFewGpus, visible


def test_no_gpu_is_lent_twice_until_it_is_given_back():
    gpus = GpuAllocator(["0", "1", "2"])
    first = gpus.take(2)
    assert (first, gpus.take(1)) == (("0", "1"), ("2",))
    gpus.give_back(first)
    assert gpus.take(1) == ("0",)


def test_too_few_are_told_with_the_numbers_and_lend_nothing():
    gpus = GpuAllocator(["0", "1"])
    with pytest.raises(TooFewGpus, match="needs 3 GPUs and 2 of 2 are free"):
        gpus.take(3)
    assert gpus.take(2) == ("0", "1")


def test_the_names_are_those_that_we_were_given_ourselves():
    assert visible({"CUDA_VISIBLE_DEVICES": "2, GPU-7f"}) == ["2", "GPU-7f"]
    assert visible({"CUDA_VISIBLE_DEVICES": ""}) == []
