"""Requests for an alias have the same bytes with and without the fast path."""

import contextlib

import pytest

from tests.dataplane.both_drivers import (
    OK_RESPONSE,
    chat_request,
    run_fast_and_slow,
    worker_sockets,
)

ALIAS = """
[[routing.models]]
name = "alias"
targets = [{{ model = "target", weight = 1 }}]
rewrite = {}
"""
BODY = b'{"messages": [], "model" : "alias", "x": 1.50}'


@pytest.fixture
def listeners(tmp_path):
    with contextlib.ExitStack() as stack:
        yield {name: stack.enter_context(sock) for name, sock in worker_sockets(tmp_path).items()}


def run(listeners, rewrite, body, **expected):
    def script(world, client):
        for _ in range(3):
            world.client_sends(client, chat_request(body=body))
            world.worker_responds(OK_RESPONSE)

    config = ALIAS.format(str(rewrite).lower())
    world = run_fast_and_slow(listeners, script, config, **expected)
    sent = b"".join(connection.received for connection in world.worker_connections)
    return world, sent


def test_a_rewritten_request_takes_the_fast_path_and_has_its_new_length(listeners):
    world, sent = run(listeners, True, BODY, began=3, handed_over=0)
    body = BODY.replace(b"alias", b"target")
    assert sent.count(b"content-length: %d\r\n\r\n%b" % (len(body), body)) == 3
    assert b'"alias"' not in sent
    assert [(row["model"], row["target_model"]) for row in world.log[-3:]] == [
        ("alias", "target")
    ] * 3
    assert [(row["model"], row["target_model"]) for row in world.routes[-3:]] == [
        ("alias", "target")
    ] * 3
    assert world.meters.alias_targets["alias", "target"] >= 3


def test_without_rewrite_the_body_is_unchanged(listeners):
    world, sent = run(listeners, False, BODY, began=3, handed_over=0)
    assert sent.count(BODY) == 3
    assert world.log[-1]["target_model"] == "target"


def test_a_body_with_two_models_is_rejected_on_both_paths(listeners):
    twice = b'{"model": "x", "model": "alias"}'
    world, sent = run(listeners, True, twice, began=0, handed_over=0)
    assert twice not in sent
    assert world.log[-1]["status"] == 400
    assert world.clients[0].received.count(b"duplicate_key") == 3
    assert world.dataplane.in_flight == 0
