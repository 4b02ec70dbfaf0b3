import os
import threading

import pytest
import torch
from safetensors.torch import save_file

from omni_proxy.replica.weights import safetensors_loader
from omni_proxy.replica.weights.live_tensors import LiveTensors, WeightsError
from omni_proxy.replica.weights.safetensors_loader import (
    FilePrefetcher,
    ReadBufferPool,
    SafetensorsLoader,
    TruncatedFile,
    allocate_read_buffer,
    read_pieces,
    tensor_memory,
)
from omni_proxy.replica.weights.weights_folder import WeightsFolder
from tests.process_group.wait_helpers import wait_until

OLD = {"a": torch.zeros(6), "b": torch.zeros(5, 2), "c": torch.zeros(3)}


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setattr(safetensors_loader, "SHARE_BYTES", 100)
    path = tmp_path / "bytes"
    path.write_bytes(bytes(n % 251 for n in range(1000)))
    descriptor = os.open(path, os.O_RDONLY)
    yield descriptor
    os.close(descriptor)


def test_every_byte_is_read_to_its_offset(file):
    whole = allocate_read_buffer(903)
    read_pieces([(file, 5, tensor_memory(whole[:403])), (file, 0, tensor_memory(whole[403:]))], 4)
    expected = [n % 251 for n in (*range(5, 408), *range(500))]
    assert whole.tolist() == expected


def test_a_file_that_is_too_short_is_reported(file):
    with pytest.raises(TruncatedFile):
        read_pieces([(file, 990, tensor_memory(allocate_read_buffer(11)))], 1)


def test_no_bytes_can_be_read(file):
    read_pieces([(file, 0, tensor_memory(allocate_read_buffer(0)))], 2)
    read_pieces([], 2)
    assert allocate_read_buffer(0).numel() == 0


def test_a_read_buffer_can_be_viewed_as_any_dtype():
    tensor = allocate_read_buffer(64).view(torch.bfloat16).view(4, 8)
    tensor.fill_(1.5)
    assert tensor.sum() == 48


def test_a_read_buffer_is_reused_only_after_it_was_given_back():
    pool = ReadBufferPool(keep_bytes=100)
    first, give_back = pool.take(80)
    second, _ = pool.take(80)
    assert first.data_ptr() != second.data_ptr()
    address = first.data_ptr()
    del first
    give_back()
    third, give_back = pool.take(60)
    assert (third.data_ptr(), third.numel()) == (address, 60)
    give_back()
    fourth, give_back = pool.take(101)
    assert fourth.numel() == 101
    give_back()
    assert pool.take(1)[0].numel() == 1


NEW = {name: tensor + 1 for name, tensor in OLD.items()}
LATER = {name: tensor + 2 for name, tensor in OLD.items()}


@pytest.fixture
def model():
    module = torch.nn.Module()
    for name, tensor in OLD.items():
        module.register_buffer(name, tensor.clone())
    return module


@pytest.fixture
def target(model):
    return LiveTensors(model)


@pytest.fixture
def folder(tmp_path):
    return WeightsFolder(str(tmp_path))


@pytest.fixture
def partial_file(tmp_path):
    """The file of a version that is being received. It has its header and its full size."""
    folder = tmp_path / "v1.partial"
    folder.mkdir()
    save_file(NEW, folder / "model.safetensors")
    return folder / "model.safetensors"


def partial_length(path):
    """The length up to which all of "a" and a part of "b" have been received."""
    return os.path.getsize(path) - 4 * (3 + 5)


def overwrite(path, tensors):
    """Writes other bytes into the same file."""
    other = path.with_name("other")
    save_file(tensors, other)
    with path.open("r+b") as file:
        file.write(other.read_bytes())
    other.unlink()


def seal(path):
    return path.parent.rename(path.parent.with_name("v1")) / path.name


def apply_update(folder, target, path):
    staged = folder.stage({"model_path": str(path)}, target)
    staged.apply_without_rollback()
    staged.forget()
    return {name: set(tensor.view(-1).tolist()) for name, tensor in target}


def prefetch(folder, target, path, nbytes):
    return folder.prefetch({"model_path": str(path), "nbytes": nbytes}, target)


def test_an_update_reads_only_what_was_not_prefetched(folder, target, partial_file):
    assert prefetch(folder, target, partial_file, partial_length(partial_file)) == 4 * (6 + 10 + 3)
    assert all(not each.any() for _, each in target), "only an update may touch live tensors"
    overwrite(partial_file, LATER)
    assert apply_update(folder, target, seal(partial_file)) == {
        "a": {1.0},
        "b": {1.0, 2.0},
        "c": {2.0},
    }


def test_bytes_are_prefetched_once_as_they_arrive(folder, target, partial_file):
    for nbytes in (
        0,
        8,
        partial_length(partial_file),
        partial_length(partial_file) + 1,
        os.path.getsize(partial_file),
    ):
        prefetch(folder, target, partial_file, nbytes)
    overwrite(partial_file, LATER)
    assert apply_update(folder, target, seal(partial_file)) == {"a": {1.0}, "b": {1.0}, "c": {1.0}}


def test_an_update_from_another_file_drops_the_prefetched_bytes(
    folder, target, partial_file, tmp_path
):
    prefetch(folder, target, partial_file, os.path.getsize(partial_file))
    save_file(LATER, tmp_path / "other.safetensors")
    assert apply_update(folder, target, tmp_path / "other.safetensors")["a"] == {2.0}
    overwrite(partial_file, LATER)
    assert apply_update(folder, target, seal(partial_file))["a"] == {2.0}, (
        "the prefetched bytes were dropped"
    )


def test_a_file_that_replaced_the_prefetched_one_is_read_again(folder, target, partial_file):
    prefetch(folder, target, partial_file, os.path.getsize(partial_file))
    save_file(LATER, partial_file.with_name("aside"))
    partial_file.with_name("aside").replace(partial_file)
    assert apply_update(folder, target, partial_file) == {"a": {2.0}, "b": {2.0}, "c": {2.0}}


def test_the_next_version_replaces_one_that_was_never_completed(
    folder, target, partial_file, tmp_path
):
    prefetch(folder, target, partial_file, partial_length(partial_file))
    save_file(LATER, tmp_path / "v2.safetensors")
    prefetch(
        folder, target, tmp_path / "v2.safetensors", partial_length(tmp_path / "v2.safetensors")
    )
    assert apply_update(folder, target, tmp_path / "v2.safetensors")["b"] == {2.0}


def test_a_prefetch_of_a_file_that_was_sealed_is_refused(folder, target, partial_file):
    prefetch(folder, target, partial_file, partial_length(partial_file))
    assert apply_update(folder, target, seal(partial_file))["c"] == {1.0}
    with pytest.raises(WeightsError, match="does not exist"):
        prefetch(folder, target, partial_file, 8)
    assert folder._prefetcher._loading is None


@pytest.mark.parametrize("nbytes", [None, "8", 8.0, -1, True])
def test_an_invalid_byte_count_is_refused(folder, target, partial_file, nbytes):
    with pytest.raises(WeightsError, match="nbytes"):
        prefetch(folder, target, partial_file, nbytes)


def test_a_tensor_that_does_not_fit_is_refused_before_it_arrives(folder, target, partial_file):
    changed = dict(NEW, b=torch.zeros(4, 2))
    save_file(changed, partial_file)
    with pytest.raises(WeightsError, match="b has the shape"):
        prefetch(folder, target, partial_file, 8)


def test_a_file_outside_the_root_is_not_read(target, partial_file, tmp_path):
    (tmp_path / "root").mkdir()
    with pytest.raises(WeightsError, match="outside --weights-root"):
        prefetch(WeightsFolder(str(tmp_path / "root")), target, partial_file, 8)
    with pytest.raises(WeightsError, match="reads no weights from disk"):
        prefetch(WeightsFolder(""), target, partial_file, 8)


def test_tensors_of_another_dtype_are_not_prefetched(folder, target, partial_file):
    save_file({name: tensor.to(torch.bfloat16) for name, tensor in NEW.items()}, partial_file)
    assert prefetch(folder, target, partial_file, os.path.getsize(partial_file)) == 0
    assert apply_update(folder, target, seal(partial_file)) == {"a": {1.0}, "b": {1.0}, "c": {1.0}}


def test_a_truncated_file_is_reported_and_not_kept(folder, target, partial_file):
    whole = os.path.getsize(partial_file)
    prefetch(folder, target, partial_file, 8)
    os.truncate(partial_file, whole - 4)
    with pytest.raises(WeightsError, match="ended in the middle"):
        prefetch(folder, target, partial_file, whole)
    os.truncate(partial_file, whole)
    overwrite(partial_file, LATER)
    assert apply_update(folder, target, seal(partial_file))["a"] == {2.0}


def test_an_unclaimed_prefetch_is_dropped_and_its_file_closed(folder, target, partial_file):
    open_files = len(os.listdir("/proc/self/fd"))
    folder._prefetcher = FilePrefetcher(keep_secs=0.01)
    prefetch(folder, target, partial_file, partial_length(partial_file))
    wait_until(lambda: len(os.listdir("/proc/self/fd")) == open_files)
    overwrite(partial_file, LATER)
    assert apply_update(folder, target, seal(partial_file))["a"] == {2.0}


def test_an_update_does_not_wait_for_the_whole_prefetch(folder, target, partial_file, monkeypatch):
    """The update waits for the current step only, and reads the rest itself."""
    monkeypatch.setattr(safetensors_loader, "STEP_BYTES", partial_length(partial_file))
    reads, reading, may_continue = [], threading.Event(), threading.Event()
    original_read = SafetensorsLoader.read

    def read(self, upto, threads):
        reads.append(upto)
        if len(reads) == 1:
            reading.set()
            assert may_continue.wait(20)
        return original_read(self, upto, threads)

    monkeypatch.setattr(SafetensorsLoader, "read", read)
    whole = os.path.getsize(partial_file)
    reader = threading.Thread(target=prefetch, args=(folder, target, partial_file, whole))
    reader.start()
    assert reading.wait(20)
    updates = []
    updater = threading.Thread(
        target=lambda: updates.append(apply_update(folder, target, partial_file))
    )
    updater.start()
    wait_until(folder._prefetcher._wanted.is_set)
    may_continue.set()
    updater.join(20)
    reader.join(20)
    assert updates == [{"a": {1.0}, "b": {1.0}, "c": {1.0}}]
    assert len(reads) == 2, "one step of the prefetch, and the read of the update"
