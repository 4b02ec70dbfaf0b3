from concurrent.futures import Future

import pytest

from omni_proxy.cli.client.admin_client import AdminReply
from omni_proxy.cli.weights import command as weights


class LateFuture(Future):
    """A future whose result arrives just as the first wait for it times out."""

    def result(self, timeout=None):
        if timeout is not None:
            super().result()
            raise TimeoutError
        return super().result()


def test_a_reply_at_the_moment_of_the_timeout_is_returned(monkeypatch):
    monkeypatch.setattr(weights, "Future", LateFuture)
    reply = AdminReply(200, {})
    assert weights.call_with_progress(lambda: reply, lambda: "") is reply


def test_a_timeout_of_the_call_itself_is_raised(monkeypatch):
    monkeypatch.setattr(weights, "Future", LateFuture)

    def call():
        raise TimeoutError("no reply")

    with pytest.raises(TimeoutError, match="no reply"):
        weights.call_with_progress(call, lambda: "")
