"""Sockets of prefill and decode workers."""

import contextlib

import pytest

from tests.dataplane.both_drivers import worker_sockets
from tests.dataplane.disaggregation.pair_world import NAMES


@pytest.fixture
def listeners(tmp_path):
    with contextlib.ExitStack() as stack:
        sockets = worker_sockets(tmp_path, "".join(NAMES))
        yield {name: stack.enter_context(sock) for name, sock in sockets.items()}
