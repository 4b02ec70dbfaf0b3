import os
from pathlib import Path

from omni_proxy.system.memory import free_bytes, is_memory_device


def test_the_free_memory_is_plausible():
    assert 1 << 20 < free_bytes() < 1 << 50


def test_only_tmpfs_and_ramfs_are_in_memory():
    assert is_memory_device(Path("/dev/shm").stat().st_dev)
    assert not is_memory_device(Path("/proc").stat().st_dev)
    assert not is_memory_device(os.makedev(4095, 255))  # not mounted
