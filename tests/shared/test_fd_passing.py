"""Descriptors sent with bytes over a Unix socket."""

import os
import socket

import pytest

from omni_proxy.shared.fd_passing import (
    MAX_DESCRIPTORS,
    ancillary_for,
    close_all,
    descriptors_in,
    duplicate_all,
    receive,
)


@pytest.fixture
def pair():
    left, right = socket.socketpair()
    with left, right:
        yield left, right


@pytest.fixture
def pipe():
    ends = os.pipe()
    yield ends
    close_all(ends)


def test_received_descriptors_refer_to_the_same_file_and_are_not_inherited(pair, pipe):
    left, right = pair
    left.sendmsg([b"x"], ancillary_for([pipe[1]]))
    data, received, truncated = receive(right, 10)
    try:
        assert (data, len(received), truncated) == (b"x", 1, False)
        assert os.path.sameopenfile(received[0], pipe[1])
        assert not os.get_inheritable(received[0])
    finally:
        close_all(received)


def test_bytes_without_descriptors_have_no_ancillary_data(pair):
    left, right = pair
    left.sendmsg([b"x"], ancillary_for([]))
    assert receive(right, 10) == (b"x", [], False)


def test_the_largest_number_of_descriptors_arrives_in_one_message(pair, pipe):
    left, right = pair
    left.sendmsg([b"x"], ancillary_for([pipe[0]] * MAX_DESCRIPTORS))
    _, received, truncated = receive(right, 10)
    close_all(received)
    assert (len(received), truncated) == (MAX_DESCRIPTORS, False)


def test_other_ancillary_data_is_ignored():
    assert descriptors_in([(socket.IPPROTO_IP, socket.SCM_RIGHTS, b"\1\0\0\0")]) == []


def test_if_one_descriptor_cannot_be_duplicated_no_duplicate_stays_open(pipe):
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="Bad file descriptor"):
        duplicate_all([pipe[0], -1])
    assert os.listdir("/proc/self/fd") == before
