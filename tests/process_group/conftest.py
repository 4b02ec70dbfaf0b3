"""Fixtures for tests of receivers: trainers, receivers of both kinds, and fork servers."""

from dataclasses import replace

import pytest

from omni_proxy.process_group.fork import forkserver_client
from omni_proxy.process_group.fork.forkserver_client import SHARED_FORK_SERVER, ForkServer
from omni_proxy.process_group.receiver import open_receiver
from tests.process_group.receiver_steps import LIMITS, torchless_server
from tests.process_group.trainer_pool import pool

__all__ = ["pool"]


@pytest.fixture(scope="session", autouse=True)
def shared_fork_server():
    """Holds the fork server for the session, so that torch is imported once for all receivers."""
    SHARED_FORK_SERVER.hold()
    yield
    SHARED_FORK_SERVER.release()


@pytest.fixture
def fork_server(monkeypatch):
    """A fork server without torch."""
    monkeypatch.setattr(forkserver_client, "command", torchless_server())
    fork_server = ForkServer()
    fork_server.hold()
    yield fork_server
    fork_server.release()


@pytest.fixture
def trainer(pool):
    return pool.trainer()


@pytest.fixture(scope="module", params=["process", "thread"])
def isolation(request):
    return request.param


@pytest.fixture(scope="module")
def shared_receiver(isolation):
    # In a thread, gloo blocks a thread of this process until `receive_secs` have passed.
    limits = LIMITS if isolation == "process" else replace(LIMITS, receive_secs=3.0)
    receiver = open_receiver(isolation, limits, name="test")
    receiver.warm()
    yield receiver
    receiver.close()


@pytest.fixture
def receiver(shared_receiver):
    """A receiver that tests share: what a test leaves in it must not affect the next."""
    yield shared_receiver
    for group in shared_receiver.status()["groups"]:
        shared_receiver.destroy(group["group_name"])
