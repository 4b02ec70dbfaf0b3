import os

from omni_proxy.weight_sync.store import filesystem


def test_a_copy_in_several_reads_is_complete_and_flushed_often(tmp_path, monkeypatch):
    monkeypatch.setattr(filesystem, "_COPY_BYTES", 1000)
    monkeypatch.setattr(filesystem, "_MAX_UNFLUSHED_BYTES", 2500)
    sizes = []
    fdatasync = os.fdatasync

    def record_fdatasync(descriptor):
        sizes.append(os.fstat(descriptor).st_size)
        fdatasync(descriptor)

    monkeypatch.setattr(filesystem.os, "fdatasync", record_fdatasync)
    data = os.urandom(10_500)
    (tmp_path / "a").write_bytes(data)
    filesystem.copy(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == data
    assert sizes == [3000, 6000, 9000]
