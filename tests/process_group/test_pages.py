import os
import resource

import pytest

from omni_proxy.process_group.mapped_file import PAGE_BYTES, map_ahead, mapped

torch = pytest.importorskip("torch")

PAGES = 4096


def test_a_file_in_memory_that_was_mapped_ahead_is_written_to_without_a_fault():
    descriptor = os.memfd_create("test-pages")
    try:
        os.posix_fallocate(descriptor, 0, PAGES * PAGE_BYTES)
        block = mapped(descriptor, PAGES * PAGE_BYTES)
        array = block.numpy()
        map_ahead(block, 100, PAGES * PAGE_BYTES)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        array[::PAGE_BYTES] = 7
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        assert faults < PAGES / 8
        assert os.pread(descriptor, 1, (PAGES - 1) * PAGE_BYTES) == b"\x07"
    finally:
        os.close(descriptor)
