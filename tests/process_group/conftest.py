"""Fixtures for tests of receivers: trainers, both kinds of receivers, a shared fork server."""

from dataclasses import replace

import pytest

from omni_proxy.process_group.fork import forkserver_client
from omni_proxy.process_group.fork.forkserver_client import SHARED_FORK_SERVER, ForkServer
from omni_proxy.process_group.receiver import open_receiver
from tests.process_group.receiver_steps import LIMITS, light
from tests.process_group.trainer_pool import pool

__all__ = ["pool"]


@pytest.fixture(scope="session", autouse=True)
def shared_fork_server():
    """torch is imported once, however many receivers come."""
    SHARED_FORK_SERVER.hold()
    yield
    SHARED_FORK_SERVER.release()


@pytest.fixture
def fork_server(monkeypatch):
    """A fork server without torch."""
    monkeypatch.setattr(forkserver_client, "command", light())
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
def kept(isolation):
    # gloo holds a thread of this process until the receive's own time is over.
    limits = LIMITS if isolation == "process" else replace(LIMITS, receive_secs=3.0)
    receiver = open_receiver(isolation, limits, name="test")
    receiver.warm()
    yield receiver
    receiver.close()


@pytest.fixture
def receiver(kept):
    """One for all tests of a kind: what a test leaves behind must not matter to the next."""
    yield kept
    for group in kept.status()["groups"]:
        kept.destroy(group["group_name"])
