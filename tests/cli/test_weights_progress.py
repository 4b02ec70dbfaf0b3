from concurrent.futures import Future

import pytest

from omni_proxy.cli import weights
from omni_proxy.cli.client.admin_client import AdminReply


class LateFuture(Future):
    """Its answer comes right after the first look for it has timed out."""

    def result(self, timeout=None):
        if timeout is not None:
            super().result()
            raise TimeoutError
        return super().result()


def test_a_reply_at_the_moment_of_the_timeout_is_returned(monkeypatch):
    monkeypatch.setattr(weights, "Future", LateFuture)
    answer = AdminReply(200, {})
    assert weights.call_with_progress(lambda: answer, lambda: "") is answer


def test_a_timeout_of_the_question_itself_is_raised(monkeypatch):
    monkeypatch.setattr(weights, "Future", LateFuture)

    def ask():
        raise TimeoutError("nobody answered")

    with pytest.raises(TimeoutError, match="nobody answered"):
        weights.call_with_progress(ask, lambda: "")
