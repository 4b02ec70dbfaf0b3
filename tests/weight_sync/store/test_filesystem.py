import os

from omni_proxy.weight_sync.store import filesystem


def test_a_copy_in_several_reads_is_complete_and_flushed_often(tmp_path, monkeypatch):
    monkeypatch.setattr(filesystem, "_COPY_BYTES", 1000)
    monkeypatch.setattr(filesystem, "_MAX_UNFLUSHED_BYTES", 2500)
    settled = []
    really = os.fdatasync

    def fdatasync(descriptor):
        settled.append(os.fstat(descriptor).st_size)
        really(descriptor)

    monkeypatch.setattr(filesystem.os, "fdatasync", fdatasync)
    data = os.urandom(10_500)
    (tmp_path / "a").write_bytes(data)
    filesystem.copy(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == data
    assert settled == [3000, 6000, 9000]
