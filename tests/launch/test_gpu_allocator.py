import pytest

from omni_proxy.launch.gpu_allocator import GpuAllocator, TooFewGpus, visible_gpus


def test_no_gpu_is_allocated_twice():
    gpus = GpuAllocator(["0", "1", "2"])
    first = gpus.allocate(2)
    assert (first, gpus.allocate(1)) == (("0", "1"), ("2",))
    gpus.release(first)
    assert gpus.allocate(1) == ("0",)


def test_too_few_gpus_are_an_error_and_allocate_none():
    gpus = GpuAllocator(["0", "1"])
    with pytest.raises(TooFewGpus, match="needs 3 GPUs and 2 of 2 are free"):
        gpus.allocate(3)
    assert gpus.allocate(2) == ("0", "1")


def test_visible_gpus_are_those_of_the_environment():
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "2, GPU-7f"}) == ["2", "GPU-7f"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}) == []
