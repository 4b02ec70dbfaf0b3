import errno
import socket
import stat
from collections import Counter

import pytest

from omni_proxy.dataplane.accept.listener import ACCEPTS_PER_EVENT, Listener, open_socket
from tests.dataplane.loop_script import until


class FailingAccepts:
    """A listening socket whose next accepts fail with the given errors."""

    def __init__(self, sock: socket.socket, *error_numbers: int) -> None:
        self._sock, self.error_numbers = sock, list(error_numbers)

    def __getattr__(self, name: str) -> object:
        return getattr(self._sock, name)

    def accept(self):
        if self.error_numbers:
            error_number = self.error_numbers.pop(0)
            raise OSError(error_number, "a test error")
        return self._sock.accept()


@pytest.fixture
def sock():
    listening = open_socket("127.0.0.1", 0)
    yield listening
    listening.close()


@pytest.fixture
def accepted():
    pairs: list[tuple[socket.socket, str]] = []
    yield pairs
    for near, _ in pairs:
        near.close()


@pytest.fixture
def connect(sock):
    clients = []

    def connect_client():
        clients.append(socket.create_connection(sock.getsockname()))
        return clients[-1]

    yield connect_client
    for client in clients:
        client.close()


async def test_the_callback_gets_each_connection_with_its_peer(loop, sock, accepted, connect):
    listener = Listener(loop, sock, lambda *pair: accepted.append(pair))
    client = connect()
    await until(lambda: accepted)
    (near, peer), = accepted  # fmt: skip
    host, port = client.getsockname()
    assert (peer, listener.address.rpartition(":")[0]) == (f"{host}:{port}", "127.0.0.1")
    assert (near.getblocking(), near.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)) == (
        False, 1,
    )  # fmt: skip
    listener.close()


@pytest.mark.parametrize("error_number", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM])
async def test_at_the_descriptor_limit_accepting_pauses_until_the_next_sweep(
    loop, sock, accepted, connect, caplog, error_number
):
    failing = FailingAccepts(sock, error_number, error_number)
    listener = Listener(loop, failing, lambda *pair: accepted.append(pair))
    connect()
    await until(lambda: len(failing.error_numbers) == 1)
    listener.retry_accepting()
    assert (failing.error_numbers, accepted) == ([], [])
    assert caplog.text.count("accept_paused") == 1
    listener.retry_accepting()
    assert len(accepted) == 1
    connect()
    await until(lambda: len(accepted) == 2)
    listener.close()


async def test_a_client_that_closed_before_accept_does_not_stop_the_others(
    loop, sock, accepted, connect
):
    failing = FailingAccepts(sock, errno.ECONNABORTED)
    listener = Listener(loop, failing, lambda *pair: accepted.append(pair))
    connect()
    await until(lambda: accepted)
    listener.close()


async def test_a_long_backlog_is_accepted_in_several_iterations(loop, sock, accepted, connect):
    backlog = 3 * ACCEPTS_PER_EVENT + 3
    for _ in range(backlog):
        connect()
    batches = []

    def on_accept(*pair):
        accepted.append(pair)
        batches.append(loop.now)

    listener = Listener(loop, sock, on_accept)
    await until(lambda: len(accepted) == backlog)
    assert list(Counter(batches).values()) == [ACCEPTS_PER_EVENT] * 3 + [3]
    listener.close()


async def test_a_closed_listener_accepts_nothing(loop, sock, accepted, connect):
    listener = Listener(loop, sock, lambda *pair: accepted.append(pair))
    listener.close()
    loop.flush()
    listener.retry_accepting()
    with pytest.raises(OSError):
        connect()
    assert accepted == []


async def test_a_paused_listener_accepts_nothing_until_it_is_resumed(loop, sock, accepted, connect):
    listener = Listener(loop, sock, lambda *pair: accepted.append(pair))
    listener.pause()
    loop.flush()
    connect()
    listener.retry_accepting()
    shared = listener.dup_socket()
    with shared:
        assert listener.is_listening
        shared.accept()[0].close()  # the connection was in the backlog
    connect()
    listener.resume()
    await until(lambda: accepted)
    assert len(accepted) == 1


def test_a_failed_bind_leaves_nothing_open(sock):
    for address in (sock.getsockname(), ("192.0.2.1", 0), ("no.such.host.invalid", 0)):
        with pytest.raises(OSError):
            open_socket(*address)


@pytest.fixture
def ipv6():
    """Opens a listening IPv6 socket."""
    with socket.socket(socket.AF_INET6) as trial:
        try:
            trial.bind(("::1", 0))
        except OSError:
            pytest.skip("this machine has no IPv6")
    return lambda host: open_socket(host, 0)


@pytest.mark.parametrize(
    ("host", "connected_to", "shown"),
    [("::1", "::1", "[::1]"), ("::", "::1", "[::1]"), ("::", "127.0.0.1", "127.0.0.1")],
)
async def test_an_ipv6_address_is_shown_in_brackets(
    loop, accepted, ipv6, host, connected_to, shown
):
    listener = Listener(loop, ipv6(host), lambda *pair: accepted.append(pair))
    host_part, _, port = listener.address.rpartition(":")
    assert host_part == f"[{host}]"
    with socket.create_connection((connected_to, int(port))) as client:
        await until(lambda: accepted)
        assert accepted[0][1] == f"{shown}:{client.getsockname()[1]}"
    listener.close()
    loop.flush()


async def test_a_bound_listener_refuses_connections_until_it_listens(loop, accepted):
    sock = open_socket("127.0.0.1", 0, listening=False)
    listener = Listener(loop, sock, lambda *pair: accepted.append(pair))
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(sock.getsockname())
    with pytest.raises(OSError, match="in use"):
        open_socket(*sock.getsockname(), listening=False)
    listener.listen()
    with socket.create_connection(sock.getsockname()):
        await until(lambda: accepted)
    listener.close()
    loop.flush()
    assert sock.fileno() < 0


async def test_a_listener_that_never_listened_can_be_closed(loop):
    sock = open_socket("127.0.0.1", 0, listening=False)
    Listener(loop, sock, lambda *pair: None).close()
    loop.flush()
    assert sock.fileno() < 0


@pytest.fixture
def file(tmp_path):
    return tmp_path / "listener.sock"


async def test_a_unix_socket_has_its_mode_and_its_file_is_removed_with_it(loop, accepted, file):
    listener = Listener(
        loop,
        open_socket(f"unix:{file}", 0, mode=0o600),
        lambda *pair: accepted.append(pair),
    )
    assert (listener.address, stat.S_IMODE(file.stat().st_mode)) == (f"unix:{file}", 0o600)
    listener.set_file_mode(0o640)
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(file))
        await until(lambda: accepted)
    assert accepted[0][1] == "unix"
    listener.close()
    assert not file.exists()


async def test_a_socket_file_of_another_program_is_not_removed(loop, file):
    listener = Listener(loop, open_socket(f"unix:{file}", 0), lambda *_: None)
    file.unlink()
    with open_socket(f"unix:{file}", 0):
        listener.close()
        assert file.exists()
    keeps_file = Listener(loop, open_socket(f"unix:{file}", 0), lambda *_: None, keeps_file=True)
    keeps_file.close()
    assert file.exists()


def test_only_a_stale_socket_file_is_replaced(file):
    open_socket(f"unix:{file}", 0).close()
    with open_socket(f"unix:{file}", 0), pytest.raises(OSError, match="another program") as taken:
        open_socket(f"unix:{file}", 0)
    assert taken.value.errno == errno.EADDRINUSE
    file.unlink()
    file.write_text("precious")
    with pytest.raises(FileExistsError, match="no socket"):
        open_socket(f"unix:{file}", 0)
    assert file.read_text() == "precious"


async def test_a_unix_socket_may_be_bound_before_it_listens(loop, accepted, file):
    sock = open_socket(f"unix:{file}", 0, listening=False)
    listener = Listener(loop, sock, lambda *pair: accepted.append(pair))
    with socket.socket(socket.AF_UNIX) as client:
        with pytest.raises(ConnectionRefusedError):
            client.connect(str(file))
        listener.listen()
        client.connect(str(file))
        await until(lambda: accepted)
    listener.close()


async def test_an_error_of_the_callback_closes_only_that_connection(loop, sock, accepted, connect):
    faults = [OSError(errno.ENOSPC, "No space left on device")]

    def on_accept(near, peer):
        if faults:
            raise faults.pop()
        accepted.append((near, peer))

    listener = Listener(loop, sock, on_accept)
    first = connect()
    await until(lambda: not faults)
    assert first.recv(1) == b""
    connect()
    listener.retry_accepting()
    await until(lambda: accepted)
    listener.close()
    loop.flush()
