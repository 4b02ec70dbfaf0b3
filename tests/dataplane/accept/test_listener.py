import errno
import socket
import stat
from collections import Counter

import pytest

from omni_proxy.dataplane.accept.listener import ACCEPTS_PER_EVENT, Listener, open_socket
from tests.dataplane.pumping import until


class Reluctant:
    """A listening socket whose next accepts fail as told."""

    def __init__(self, sock: socket.socket, *numbers: int) -> None:
        self._sock, self.numbers = sock, list(numbers)

    def __getattr__(self, name: str) -> object:
        return getattr(self._sock, name)

    def accept(self):
        if self.numbers:
            number = self.numbers.pop(0)
            raise OSError(number, "told to fail")
        return self._sock.accept()


@pytest.fixture
def sock():
    opened = open_socket("127.0.0.1", 0)
    yield opened
    opened.close()


@pytest.fixture
def guests():
    came: list[tuple[socket.socket, str]] = []
    yield came
    for guest, _ in came:
        guest.close()


@pytest.fixture
def call(sock):
    callers = []

    def dial():
        callers.append(socket.create_connection(sock.getsockname()))
        return callers[-1]

    yield dial
    for caller in callers:
        caller.close()


async def test_each_connection_is_welcomed_with_its_peer(loop, sock, guests, call):
    listener = Listener(loop, sock, lambda *guest: guests.append(guest))
    caller = call()
    await until(lambda: guests)
    (guest, peer), = guests  # fmt: skip
    host, port = caller.getsockname()
    assert (peer, listener.address.rpartition(":")[0]) == (f"{host}:{port}", "127.0.0.1")
    assert (guest.getblocking(), guest.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)) == (
        False, 1,
    )  # fmt: skip
    listener.close()


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM])
async def test_at_its_limit_it_pauses_says_so_once_and_goes_on_at_the_next_sweep(
    loop, sock, guests, call, caplog, number
):
    reluctant = Reluctant(sock, number, number)
    listener = Listener(loop, reluctant, lambda *guest: guests.append(guest))
    call()
    await until(lambda: len(reluctant.numbers) == 1)
    listener.sweep()
    assert (reluctant.numbers, guests) == ([], [])
    assert caplog.text.count("stops accepting for a moment") == 1
    listener.sweep()
    assert len(guests) == 1
    call()
    await until(lambda: len(guests) == 2)
    listener.close()


async def test_a_caller_that_left_before_its_turn_stops_nobody(loop, sock, guests, call):
    reluctant = Reluctant(sock, errno.ECONNABORTED)
    listener = Listener(loop, reluctant, lambda *guest: guests.append(guest))
    call()
    await until(lambda: guests)
    listener.close()


async def test_a_crowd_is_let_in_by_portions_one_right_after_the_other(loop, sock, guests, call):
    crowd = 3 * ACCEPTS_PER_EVENT + 3
    for _ in range(crowd):
        call()
    batches = []

    def welcome(*guest):
        guests.append(guest)
        batches.append(loop.now)

    listener = Listener(loop, sock, welcome)
    await until(lambda: len(guests) == crowd)
    assert list(Counter(batches).values()) == [ACCEPTS_PER_EVENT] * 3 + [3]
    listener.close()


async def test_a_closed_listener_lets_nobody_in(loop, sock, guests, call):
    listener = Listener(loop, sock, lambda *guest: guests.append(guest))
    listener.close()
    loop.flush()
    listener.sweep()
    with pytest.raises(OSError):
        call()
    assert guests == []


async def test_one_that_rests_lets_nobody_in_until_it_works_again(loop, sock, guests, call):
    listener = Listener(loop, sock, lambda *guest: guests.append(guest))
    listener.pause()
    loop.flush()
    call()
    listener.sweep()
    shared = listener.dup_socket()
    with shared:
        assert listener.is_listening
        shared.accept()[0].close()  # it waited for whoever has the socket
    call()
    listener.resume()
    await until(lambda: guests)
    assert len(guests) == 1


def test_what_cannot_be_bound_leaves_nothing_open(sock):
    for place in (sock.getsockname(), ("192.0.2.1", 0), ("no.such.host.invalid", 0)):
        with pytest.raises(OSError):
            open_socket(*place)


@pytest.fixture
def ipv6():
    """Opens a listening socket of that family."""
    with socket.socket(socket.AF_INET6) as trial:
        try:
            trial.bind(("::1", 0))
        except OSError:
            pytest.skip("no IPv6 here")
    return lambda host: open_socket(host, 0)


@pytest.mark.parametrize(
    ("host", "called", "shown"),
    [("::1", "::1", "[::1]"), ("::", "::1", "[::1]"), ("::", "127.0.0.1", "127.0.0.1")],
)
async def test_an_ipv6_address_is_shown_in_brackets(loop, guests, ipv6, host, called, shown):
    listener = Listener(loop, ipv6(host), lambda *guest: guests.append(guest))
    place, _, port = listener.address.rpartition(":")
    assert place == f"[{host}]"
    with socket.create_connection((called, int(port))) as caller:
        await until(lambda: guests)
        assert guests[0][1] == f"{shown}:{caller.getsockname()[1]}"
    listener.close()
    loop.flush()


async def test_one_that_is_only_bound_holds_its_port_and_lets_nobody_in_yet(loop, guests):
    sock = open_socket("127.0.0.1", 0, listening=False)
    listener = Listener(loop, sock, lambda *guest: guests.append(guest))
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(sock.getsockname())
    with pytest.raises(OSError, match="in use"):
        open_socket(*sock.getsockname(), listening=False)
    listener.listen()
    with socket.create_connection(sock.getsockname()):
        await until(lambda: guests)
    listener.close()
    loop.flush()
    assert sock.fileno() < 0


async def test_one_that_never_listened_closes_as_any_other(loop):
    sock = open_socket("127.0.0.1", 0, listening=False)
    Listener(loop, sock, lambda *guest: None).close()
    loop.flush()
    assert sock.fileno() < 0


@pytest.fixture
def file(tmp_path):
    return tmp_path / "door.sock"


async def test_a_socket_file_lets_in_who_may_and_goes_with_its_listener(loop, guests, file):
    listener = Listener(
        loop, open_socket(f"unix:{file}", 0, mode=0o600), lambda *guest: guests.append(guest)
    )
    assert (listener.address, stat.S_IMODE(file.stat().st_mode)) == (f"unix:{file}", 0o600)
    listener.set_file_mode(0o640)
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    with socket.socket(socket.AF_UNIX) as caller:
        caller.connect(str(file))
        await until(lambda: guests)
    assert guests[0][1] == "unix"
    listener.close()
    assert not file.exists()


async def test_a_file_that_is_another_programs_by_now_stays(loop, file):
    listener = Listener(loop, open_socket(f"unix:{file}", 0), lambda *_: None)
    file.unlink()
    with open_socket(f"unix:{file}", 0):
        listener.close()
        assert file.exists()
    given = Listener(loop, open_socket(f"unix:{file}", 0), lambda *_: None, keeps_file=True)
    given.close()
    assert file.exists()


def test_a_file_that_nobody_listens_on_is_replaced_and_any_other_is_not(file):
    open_socket(f"unix:{file}", 0).close()
    with open_socket(f"unix:{file}", 0), pytest.raises(OSError, match="another program") as taken:
        open_socket(f"unix:{file}", 0)
    assert taken.value.errno == errno.EADDRINUSE
    file.unlink()
    file.write_text("precious")
    with pytest.raises(FileExistsError, match="no socket"):
        open_socket(f"unix:{file}", 0)
    assert file.read_text() == "precious"


async def test_a_socket_file_may_be_taken_before_it_is_open(loop, guests, file):
    sock = open_socket(f"unix:{file}", 0, listening=False)
    listener = Listener(loop, sock, lambda *guest: guests.append(guest))
    with socket.socket(socket.AF_UNIX) as caller:
        with pytest.raises(ConnectionRefusedError):
            caller.connect(str(file))
        listener.listen()
        caller.connect(str(file))
        await until(lambda: guests)
    listener.close()


async def test_a_connection_that_cannot_be_watched_ends_alone(loop, sock, guests, call):
    faults = [OSError(errno.ENOSPC, "No space left on device")]

    def welcome(guest, peer):
        if faults:
            raise faults.pop()
        guests.append((guest, peer))

    listener = Listener(loop, sock, welcome)
    first = call()
    await until(lambda: not faults)
    assert first.recv(1) == b""
    call()
    listener.sweep()
    await until(lambda: guests)
    listener.close()
    loop.flush()
