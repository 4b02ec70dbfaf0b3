"""Addresses for Envoy: of one program, or for a moment of two."""

import socket

import pytest

from omni_proxy.picker.ext_proc.grpc_listener import GrpcAddress


@pytest.fixture
def opened():
    """`open_at(address)` listens as gRPC does, and returns the port; sockets end with the test."""
    socks = []

    def open_at(address):
        if address.startswith("unix:"):
            sock = socket.socket(socket.AF_UNIX)
            sock.bind(address[5:])
        else:
            host, _, port = address.rpartition(":")
            sock = socket.socket()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            sock.bind((host, int(port)))
        socks.append(sock)
        sock.listen()
        return 0 if address.startswith("unix:") else sock.getsockname()[1]

    yield open_at
    for sock in socks:
        sock.close()


def test_an_address_is_refused_to_a_second_program_unless_it_takes_over(opened):
    address = GrpcAddress("127.0.0.1:0", shared=False).bind(opened)
    with pytest.raises(OSError, match="cannot listen for Envoy: Address already in use") as refused:
        GrpcAddress(address, shared=False).bind(opened)
    assert refused.value.filename == address
    assert GrpcAddress(address, shared=True).bind(opened) == address


def test_a_unix_socket_is_replaced_by_the_program_that_takes_over_and_removed_by_its_owner(
    opened, tmp_path, monkeypatch
):
    path = tmp_path / "picker.sock"
    old, new = (GrpcAddress(f"unix:{path}", shared=shared) for shared in (False, True))
    assert old.bind(opened) == f"unix:{path}"
    before = path.stat().st_ino
    with pytest.raises(OSError, match="Address already in use"):
        GrpcAddress(f"unix:{path}", shared=False).bind(opened)
    new.bind(opened)
    assert path.stat().st_ino != before
    old.unlink()
    assert path.exists()
    new.unlink()
    assert not path.exists()
    new.unlink()


def test_the_socket_of_a_program_that_died_is_replaced_and_no_other_file_is(opened, tmp_path):
    path = tmp_path / "picker.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    GrpcAddress(f"unix:{path}", shared=False).bind(opened)
    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.raises(OSError, match="not a socket"):
        GrpcAddress(f"unix:{file}", shared=False).bind(opened)
    assert file.read_text() == "mine"
