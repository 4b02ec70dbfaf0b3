import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from omni_proxy.process_group.rendezvous import connect_store
from omni_proxy.process_group.tensor_plan import GroupError
from tests.process_group.trainer_process import TrainerPool, free_port
from tests.process_group.wait_helpers import run_within


@pytest.fixture
def store():
    return TCPStore("127.0.0.1", free_port(), 2, True, timedelta(seconds=5), wait_for_workers=False)


def never():
    return False


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(10)
        yield listener


def test_a_store_answers_and_keeps_working(store):
    link = connect_store(("127.0.0.1", store.port), 5.0, never)
    assert not link.has_ended()
    assert link.answers(5.0)
    assert link.answers(5.0)
    store.set("key", "value")
    assert store.get("key") == b"value"
    link.close()
    assert link.has_ended()
    assert not link.answers(5.0)


def test_the_end_of_the_store_is_noticed_and_remembered():
    pool = TrainerPool()
    trainer = pool.trainer()
    port = trainer.tell("open", group="g")["port"]
    link = connect_store(("127.0.0.1", port), 5.0, never)
    assert not link.has_ended()
    trainer.kill()
    assert not link.answers(5.0)
    assert link.has_ended()
    assert link.has_ended()
    link.close()
    pool.close()


def test_has_ended_does_not_wait_for_a_ping(listener):
    with ThreadPoolExecutor(1) as threads:
        opening = threads.submit(connect_store, listener.getsockname(), 10.0, never)
        connection, _ = listener.accept()
        with connection:
            connection.sendall(connection.recv(64)[-4:])
            link = opening.result(30)
            pinging = threads.submit(link.answers, 60.0)
            assert connection.recv(64)
            assert not run_within(10, link.has_ended)
            assert not pinging.done()
        assert not pinging.result(30)
        assert link.has_ended()
    link.close()


def test_a_cancelled_connect_ends_between_two_attempts():
    cancelled = iter([False, False, True])
    with pytest.raises(GroupError, match="gave up waiting for the trainer's store at 127"):
        connect_store(("127.0.0.1", free_port()), 5.0, lambda: next(cancelled))


def test_a_port_that_first_closes_connections_may_become_a_store(listener, monkeypatch):
    """A port forwarder closes connections while nothing listens at its target."""
    host, port = listener.getsockname()
    stores = []

    def hang_up_then_become_a_store():
        connection, _ = listener.accept()
        connection.close()
        listener.close()
        stores.append(TCPStore(host, port, 2, True, timedelta(seconds=5), wait_for_workers=False))

    with ThreadPoolExecutor(1) as threads:
        becoming_a_store = threads.submit(hang_up_then_become_a_store)
        link = connect_store((host, port), 5.0, never)
        becoming_a_store.result()
    assert link.answers(5.0)
    link.close()


def test_a_port_that_always_closes_connections_is_not_a_store(listener):
    def hang_up():
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            connection.close()

    with ThreadPoolExecutor(1) as threads:
        threads.submit(hang_up)
        with pytest.raises(GroupError, match="no torch store answered there"):
            connect_store(listener.getsockname(), 0.3, never)
        listener.shutdown(socket.SHUT_RDWR)


def test_a_connection_never_uses_its_target_port_as_the_local_port(monkeypatch):
    """The kernel may choose that port as the local one. The socket would connect to itself."""
    port, attempts = free_port(), iter([False, False, True])

    class SocketOnTargetPort(socket.socket):
        def bind(self, address):
            super().bind((address[0], port))

        def connect(self, address):
            if not self.getsockname()[1]:
                self.bind(("", 0))
            super().connect(address)

    monkeypatch.setattr(socket, "socket", SocketOnTargetPort)
    with pytest.raises(GroupError, match="gave up waiting for the trainer's store"):
        connect_store(("127.0.0.1", port), 5.0, lambda: next(attempts))
