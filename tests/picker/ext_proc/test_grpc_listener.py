"""Addresses for Envoy, which two programs share for a moment during an upgrade."""

import socket

import pytest

from omni_proxy.picker.ext_proc.grpc_server import GrpcAddress


@pytest.fixture
def open_listener():
    """`open_at(address)` listens as gRPC does, and returns the port; the test's end closes it."""
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


def test_a_second_program_can_bind_an_address_only_to_take_over(open_listener):
    address = GrpcAddress("127.0.0.1:0", shared=False).bind(open_listener)
    with pytest.raises(OSError, match="cannot listen for Envoy: Address already in use") as refused:
        GrpcAddress(address, shared=False).bind(open_listener)
    assert refused.value.filename == address
    assert GrpcAddress(address, shared=True).bind(open_listener) == address


def test_a_unix_socket_is_replaced_by_a_takeover_and_removed_by_its_owner(
    open_listener, tmp_path, monkeypatch
):
    path = tmp_path / "picker.sock"
    old, new = (GrpcAddress(f"unix:{path}", shared=shared) for shared in (False, True))
    assert old.bind(open_listener) == f"unix:{path}"
    before = path.stat().st_ino
    with pytest.raises(OSError, match="Address already in use"):
        GrpcAddress(f"unix:{path}", shared=False).bind(open_listener)
    new.bind(open_listener)
    assert path.stat().st_ino != before
    old.unlink()
    assert path.exists()
    new.unlink()
    assert not path.exists()
    new.unlink()


def test_only_the_socket_of_a_dead_program_is_replaced(open_listener, tmp_path):
    path = tmp_path / "picker.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    GrpcAddress(f"unix:{path}", shared=False).bind(open_listener)
    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.raises(OSError, match="not a socket"):
        GrpcAddress(f"unix:{file}", shared=False).bind(open_listener)
    assert file.read_text() == "mine"
