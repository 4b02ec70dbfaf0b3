import os

import pytest
import torch

from omni_proxy.replica.weights import safetensors_loader
from omni_proxy.replica.weights.safetensors_loader import (
    ReadBufferPool,
    TruncatedFile,
    allocate_read_buffer,
    read_pieces,
    tensor_memory,
)


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
