import os
import resource

import pytest

from omni_proxy.process_group.broadcast import mapped_file as module
from omni_proxy.process_group.broadcast.mapped_file import (
    PAGE_BYTES,
    FileRegion,
    map_file,
    map_file_to_read,
    map_resident_pages,
    open_for_receive,
    region_span,
)
from omni_proxy.process_group.tensor_plan import GroupError, make_plan


def plan(size):
    return make_plan([("w", "uint8", [size])], dense=True)


def test_the_span_reaches_from_the_first_block_to_the_end_of_the_last():
    assert region_span(FileRegion("f", (50, 10)), (plan(30), plan(40))) == (10, 80)


def test_empty_blocks_may_share_an_offset():
    assert region_span(FileRegion("f", (10, 10, 10)), (plan(0), plan(5), plan(0))) == (10, 15)


@pytest.mark.parametrize("starts", [(10, 10), (0, 29), (30, 1)])
def test_blocks_that_overlap_are_refused(starts):
    with pytest.raises(GroupError, match=r"two buckets would share byte \d+ of f"):
        region_span(FileRegion("f", starts), (plan(30), plan(30)))


def test_the_blocks_of_a_sparse_file_are_allocated(tmp_path):
    path = tmp_path / "version"
    path.touch()
    os.truncate(path, 1 << 20)
    assert path.stat().st_blocks == 0
    descriptor = open_for_receive(FileRegion(str(path), (4096,)), (plan(8192),))
    os.close(descriptor)
    assert path.stat().st_blocks * 512 >= 8192
    assert path.stat().st_size == 1 << 20


def test_a_full_disk_is_reported_with_the_sizes(tmp_path, monkeypatch):
    path = tmp_path / "version"
    path.write_bytes(bytes(8192))

    def fail(descriptor, offset, size):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.os, "posix_fallocate", fail)
    files = len(os.listdir("/proc/self/fd"))
    message = rf"need 8192 bytes of {path}, and {tmp_path} has room for \d+ more \(No space left"
    with pytest.raises(GroupError, match=message):
        open_for_receive(FileRegion(str(path), (0,)), (plan(8192),))
    assert len(os.listdir("/proc/self/fd")) == files


def test_a_file_in_memory_needs_free_memory(monkeypatch):
    path = f"/dev/shm/omni-test-place-{os.getpid()}"
    with open(path, "wb") as file:
        file.truncate(1 << 20)
    try:
        monkeypatch.setattr(module, "free_bytes", lambda: 1000)
        with pytest.raises(GroupError, match=r"need 1048576 bytes, but only 1000"):
            open_for_receive(FileRegion(path, (0,)), (plan(1 << 20),))
        monkeypatch.setattr(module, "free_bytes", lambda: 1 << 30)
        os.close(open_for_receive(FileRegion(path, (0,)), (plan(1 << 20),)))
    finally:
        os.unlink(path)


def test_a_resident_file_is_not_allocated_again(monkeypatch):
    path = f"/dev/shm/omni-test-whole-{os.getpid()}"
    with open(path, "wb") as file:
        file.write(bytes(1 << 20))

    def fail(*_):
        raise AssertionError("the file was allocated again")

    monkeypatch.setattr(module.os, "posix_fallocate", fail)
    try:
        os.close(open_for_receive(FileRegion(path, (0,)), (plan(1 << 20),)))
    finally:
        os.unlink(path)


def test_a_write_mapping_changes_the_file_and_a_read_mapping_does_not(tmp_path):
    path = tmp_path / "version"
    path.write_bytes(bytes(100))
    with open(path, "r+b") as file:
        write_mapping = map_file(file.fileno(), 100)
    write_mapping[99] = 7
    assert path.read_bytes()[99] == 7
    read_mapping = map_file_to_read(str(path), 100)
    read_mapping[98] = 6
    assert path.read_bytes()[98] == 0
    assert map_file_to_read(str(path), 0).numel() == 0


PAGES = 4096


def test_writes_to_prefaulted_pages_cause_no_page_fault():
    descriptor = os.memfd_create("test-pages")
    try:
        os.posix_fallocate(descriptor, 0, PAGES * PAGE_BYTES)
        block = map_file(descriptor, PAGES * PAGE_BYTES)
        array = block.numpy()
        map_resident_pages(block, 100, PAGES * PAGE_BYTES)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        array[::PAGE_BYTES] = 7
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        assert faults < PAGES / 8
        assert os.pread(descriptor, 1, (PAGES - 1) * PAGE_BYTES) == b"\x07"
    finally:
        os.close(descriptor)
