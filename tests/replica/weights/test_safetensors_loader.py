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
    wanted = [n % 251 for n in (*range(5, 408), *range(500))]
    assert whole.tolist() == wanted


def test_a_file_that_is_too_short_is_reported(file):
    with pytest.raises(TruncatedFile):
        read_pieces([(file, 990, tensor_memory(allocate_read_buffer(11)))], 1)


def test_nothing_may_be_read_too(file):
    read_pieces([(file, 0, tensor_memory(allocate_read_buffer(0)))], 2)
    read_pieces([], 2)
    assert allocate_read_buffer(0).numel() == 0


def test_memory_is_viewed_as_any_type():
    tensor = allocate_read_buffer(64).view(torch.bfloat16).view(4, 8)
    tensor.fill_(1.5)
    assert tensor.sum() == 48


def test_memory_is_used_again_once_it_was_given_back_and_not_before():
    rooms = ReadBufferPool(keep_bytes=100)
    first, back = rooms.take(80)
    second, _ = rooms.take(80)
    assert first.data_ptr() != second.data_ptr()
    place = first.data_ptr()
    del first
    back()
    third, back = rooms.take(60)
    assert (third.data_ptr(), third.numel()) == (place, 60)
    back()
    fourth, back = rooms.take(101)
    assert fourth.numel() == 101
    back()
    assert rooms.take(1)[0].numel() == 1


NEW = {name: each + 1 for name, each in OLD.items()}
LATER = {name: each + 2 for name, each in OLD.items()}


@pytest.fixture
def model():
    made = torch.nn.Module()
    for name, each in OLD.items():
        made.register_buffer(name, each.clone())
    return made


@pytest.fixture
def target(model):
    return LiveTensors(model)


@pytest.fixture
def folder(tmp_path):
    return WeightsFolder(str(tmp_path))


@pytest.fixture
def coming(tmp_path):
    """The file of a version that is being received: of full size, with its header."""
    place = tmp_path / "v1.partial"
    place.mkdir()
    save_file(NEW, place / "model.safetensors")
    return place / "model.safetensors"


def half(path):
    """The length up to which all of "a" and a part of "b" is written."""
    return os.path.getsize(path) - 4 * (3 + 5)


def written(path, tensors):
    """The same path with other bytes; an open file keeps the old ones."""
    aside = path.with_name("aside")
    save_file(tensors, aside)
    with path.open("r+b") as file:
        file.write(aside.read_bytes())
    aside.unlink()


def sealed(path):
    return path.parent.rename(path.parent.with_name("v1")) / path.name


def applied(folder, target, path):
    staged = folder.stage({"model_path": str(path)}, target)
    staged.apply_for_good()
    staged.forget()
    return {name: set(each.view(-1).tolist()) for name, each in target}


def prefetch(folder, target, path, nbytes):
    return folder.prefetch({"model_path": str(path), "nbytes": nbytes}, target)


def test_an_update_reads_only_what_was_not_read_ahead(folder, target, coming):
    assert prefetch(folder, target, coming, half(coming)) == 4 * (6 + 10 + 3)
    assert all(not each.any() for _, each in target), "only an update may touch live tensors"
    written(coming, LATER)
    assert applied(folder, target, sealed(coming)) == {"a": {1.0}, "b": {1.0, 2.0}, "c": {2.0}}


def test_bytes_are_final_bit_by_bit(folder, target, coming):
    for nbytes in (0, 8, half(coming), half(coming) + 1, os.path.getsize(coming)):
        prefetch(folder, target, coming, nbytes)
    written(coming, LATER)
    assert applied(folder, target, sealed(coming)) == {"a": {1.0}, "b": {1.0}, "c": {1.0}}


def test_another_file_gets_nothing_of_it(folder, target, coming, tmp_path):
    prefetch(folder, target, coming, os.path.getsize(coming))
    save_file(LATER, tmp_path / "other.safetensors")
    assert applied(folder, target, tmp_path / "other.safetensors")["a"] == {2.0}
    written(coming, LATER)
    assert applied(folder, target, sealed(coming))["a"] == {2.0}, "it was dropped then"


def test_a_file_in_the_place_of_the_one_that_was_read_is_read_anew(folder, target, coming):
    prefetch(folder, target, coming, os.path.getsize(coming))
    save_file(LATER, coming.with_name("aside"))
    coming.with_name("aside").replace(coming)
    assert applied(folder, target, coming) == {"a": {2.0}, "b": {2.0}, "c": {2.0}}


def test_the_next_version_takes_the_place_of_one_that_never_became_whole(
    folder, target, coming, tmp_path
):
    prefetch(folder, target, coming, half(coming))
    save_file(LATER, tmp_path / "v2.safetensors")
    prefetch(folder, target, tmp_path / "v2.safetensors", half(tmp_path / "v2.safetensors"))
    assert applied(folder, target, tmp_path / "v2.safetensors")["b"] == {2.0}


def test_a_progress_report_of_a_sealed_file_starts_nothing(folder, target, coming):
    prefetch(folder, target, coming, half(coming))
    assert applied(folder, target, sealed(coming))["c"] == {1.0}
    with pytest.raises(WeightsError, match="does not exist"):
        prefetch(folder, target, coming, 8)
    assert folder._prefetcher._loading is None


@pytest.mark.parametrize("nbytes", [None, "8", 8.0, -1, True])
def test_a_count_that_is_none_is_refused(folder, target, coming, nbytes):
    with pytest.raises(WeightsError, match="nbytes"):
        prefetch(folder, target, coming, nbytes)


def test_a_tensor_that_does_not_fit_is_refused_before_it_arrives(folder, target, coming):
    written_anew = dict(NEW, b=torch.zeros(4, 2))
    save_file(written_anew, coming)
    with pytest.raises(WeightsError, match="b has the shape"):
        prefetch(folder, target, coming, 8)


def test_a_file_outside_the_root_is_not_read(target, coming, tmp_path):
    (tmp_path / "root").mkdir()
    with pytest.raises(WeightsError, match="outside --weights-root"):
        prefetch(WeightsFolder(str(tmp_path / "root")), target, coming, 8)
    with pytest.raises(WeightsError, match="reads no weights from disk"):
        prefetch(WeightsFolder(""), target, coming, 8)


def test_what_has_to_become_another_type_is_left_to_the_update(folder, target, coming):
    save_file({name: each.to(torch.bfloat16) for name, each in NEW.items()}, coming)
    assert prefetch(folder, target, coming, os.path.getsize(coming)) == 0
    assert applied(folder, target, sealed(coming)) == {"a": {1.0}, "b": {1.0}, "c": {1.0}}


def test_a_file_that_was_cut_short_is_reported_and_not_kept(folder, target, coming):
    whole = os.path.getsize(coming)
    prefetch(folder, target, coming, 8)
    os.truncate(coming, whole - 4)
    with pytest.raises(WeightsError, match="ended in the middle"):
        prefetch(folder, target, coming, whole)
    os.truncate(coming, whole)
    written(coming, LATER)
    assert applied(folder, target, sealed(coming))["a"] == {2.0}


def test_an_unclaimed_prefetch_is_dropped_and_its_file_closed(folder, target, coming):
    open_files = len(os.listdir("/proc/self/fd"))
    folder._prefetcher = FilePrefetcher(keep_secs=0.01)
    prefetch(folder, target, coming, half(coming))
    wait_until(lambda: len(os.listdir("/proc/self/fd")) == open_files)
    written(coming, LATER)
    assert applied(folder, target, sealed(coming))["a"] == {2.0}


def test_an_update_does_not_wait_for_all_that_is_being_read_ahead(
    folder, target, coming, monkeypatch
):
    """It takes over after the current step, and reads the rest itself."""
    monkeypatch.setattr(safetensors_loader, "STEP_BYTES", half(coming))
    reads, within, go_on = [], threading.Event(), threading.Event()
    plain = SafetensorsLoader.read

    def read(self, upto, threads):
        reads.append(upto)
        if len(reads) == 1:
            within.set()
            assert go_on.wait(20)
        return plain(self, upto, threads)

    monkeypatch.setattr(SafetensorsLoader, "read", read)
    whole = os.path.getsize(coming)
    reader = threading.Thread(target=prefetch, args=(folder, target, coming, whole))
    reader.start()
    assert within.wait(20)
    updates = []
    updater = threading.Thread(target=lambda: updates.append(applied(folder, target, coming)))
    updater.start()
    wait_until(folder._prefetcher._wanted.is_set)
    go_on.set()
    updater.join(20)
    reader.join(20)
    assert updates == [{"a": {1.0}, "b": {1.0}, "c": {1.0}}]
    assert len(reads) == 2, "one step of the reader's, and the update's own"
