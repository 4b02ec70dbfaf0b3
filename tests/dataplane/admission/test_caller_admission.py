"""Callers' keys with and without the fast path: admission, forwarded fields, limits and counts."""

import contextlib
import re
from hashlib import sha256

import pytest

from omni_proxy.api_keys.caller_limits import LocalRows, slot_totals
from omni_proxy.api_keys.key_table import KeyTable
from omni_proxy.config.parse import parse
from omni_proxy.dataplane.admission.caller_admission import max_tokens_in
from omni_proxy.wire.chunked import encode_chunk
from tests.dataplane.both_drivers import (
    OK_RESPONSE,
    chat_request,
    run_fast_and_slow,
    worker_sockets,
)

KEYS = (b"key-a", b"key-b")
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)


@pytest.fixture
def listeners(tmp_path):
    with contextlib.ExitStack() as stack:
        sockets = worker_sockets(tmp_path, "a")
        yield {name: stack.enter_context(sock) for name, sock in sockets.items()}


def keys(*limits, more=""):
    tables = [
        f'[[keys]]\nname = "team-{key[-1:].decode()}"\nkey_sha256 = "{sha256(key).hexdigest()}"\n'
        + limit
        for key, limit in zip(KEYS, limits, strict=False)
    ]
    return more + "\n" + "\n".join(tables)


def bearer(key):
    return b"Authorization: Bearer " + key


def request(key=KEYS[0], body=b'{"messages": []}'):
    return chat_request(body=body, fields=(bearer(key),))


def statuses(client):
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d+)", client.received)]


def callers(world):
    return {caller.name: caller for caller in world.dataplane.settings.callers}


def play(listeners, script, config, *, began=0, handed_over=0):
    return run_fast_and_slow(
        listeners, script, config, began=began, handed_over=handed_over, warm=0
    )


def warm_up(world, client, request_bytes=None):
    """Fill the caches by six requests and responses like those that follow."""
    for _ in range(6):
        world.client_sends(client, request_bytes or request())
        world.worker_responds(OK_RESPONSE)
    world.began = world.handed_over = 0


def sent_to_workers(world):
    return b"".join(connection.received for connection in world.worker_connections).lower()


def test_requests_with_a_key_take_the_fast_path_and_no_worker_gets_the_key(listeners):
    def script(world, client):
        warm_up(world, client)
        for _ in range(4):
            world.client_sends(client, request())
            world.worker_responds(OK_RESPONSE)
        assert statuses(client) == [200] * 10
        for secret in (b"key-a", b"authorization", b"x-api-key"):
            assert secret not in sent_to_workers(world)
        assert callers(world)["team-a"].in_flight == 0

    world = play(listeners, script, keys("", ""), began=4)
    assert [line["key"] for line in world.log] == ["team-a"] * 10
    assert "key-a" not in str(world.log)


@pytest.mark.parametrize(
    "field", [b"Authorization: Bearer wrong", b"x-api-key: wrong", b"accept: a/b"]
)
def test_a_request_without_a_valid_key_is_rejected_on_both_paths(listeners, field):
    def script(world, client):
        warm_up(world, client)
        for _ in range(3):
            world.client_sends(client, chat_request(body=b"{}", fields=(field,)))
        assert statuses(client)[6:] == [401]  # its body is not read, so the connection ends
        assert b"www-authenticate: Bearer" in client.received
        assert not any(caller.in_flight for caller in callers(world).values())

    play(listeners, script, keys(""))


@pytest.mark.parametrize("change", ["removed", "replaced"])
def test_a_key_removed_by_a_reload_is_rejected_on_open_connections_too(listeners, change):
    """Both connections have sent the key before, and their heads are cached."""
    config = keys("", "")
    first = sha256(KEYS[0]).hexdigest()
    without = config[config.index('[[keys]]\nname = "team-b"') :]
    replaced = config.replace(first, sha256(b"another").hexdigest())
    changed = without if change == "removed" else replaced

    def script(world, client):
        other = world.connect_client()
        warm_up(world, client)
        warm_up(world, other)
        table = KeyTable(parse(changed).keys)
        slots = {entry.name: number for number, entry in enumerate(table.entries, 1)}
        world.dataplane.follow_keys(table, slots, LocalRows())
        for open_client in (client, other):
            world.client_sends(open_client, request())
            assert statuses(open_client)[-1] == 401
        third = world.connect_client()
        world.client_sends(third, request(KEYS[1]))
        world.worker_responds(OK_RESPONSE)
        assert statuses(third) == [200]

    play(listeners, script, config)


def test_workers_get_neither_of_the_two_fields_for_keys(listeners):
    def script(world, client):
        fields = (b"X-Api-Key: key-b", b"accept: a/b", bearer(b"key-a"), b"x-other: 1")
        warm_up(world, client, chat_request(fields=fields))
        world.client_sends(client, chat_request(fields=fields))
        world.worker_responds(OK_RESPONSE)
        assert statuses(client) == [200] * 7
        assert b"key-" not in sent_to_workers(world)
        assert sent_to_workers(world).count(b"accept: a/b\r\n") == 7
        assert sent_to_workers(world).count(b"x-other: 1\r\n") == 7

    play(listeners, script, keys("", ""), began=1)


def test_the_server_key_has_no_limits_and_counts_for_no_caller(listeners):
    limits = 'requests_per_minute = 1\nmodels = ["m"]\n'

    def script(world, client):
        warm_up(world, client, request(b"server"))
        for _ in range(3):
            world.client_sends(client, request(b"server"))
            world.worker_responds(OK_RESPONSE)
        assert statuses(client) == [200] * 9
        assert b"x-ratelimit" not in client.received

    play(listeners, script, keys(limits, more="api_key = 'server'"), began=3)


def test_requests_with_the_server_key_take_the_fast_path(listeners):
    def script(world, client):
        warm_up(world, client, request(b"server"))
        for _ in range(3):
            world.client_sends(client, request(b"server"))
            world.worker_responds(OK_RESPONSE)
        world.client_sends(client, request(b"other"))
        assert statuses(client) == [200] * 9 + [401]
        assert b"bearer server" in sent_to_workers(world)  # without [[keys]] it is forwarded

    play(listeners, script, "api_key = 'server'", began=3)


def test_requests_above_the_rate_get_429_until_the_minute_has_passed(listeners):
    def script(world, client):
        warm_up(world, client)
        for _ in range(4):
            world.client_sends(client, request())
            world.worker_responds(OK_RESPONSE)
        assert statuses(client) == [200] * 8 + [429]
        last = client.received[client.received.rindex(b"HTTP/1.1 429") :]
        assert re.search(rb"retry-after: 6[01]\r\n", last)
        assert b"x-ratelimit-limit-requests: 8\r\n" in last
        assert b"x-ratelimit-remaining-requests: 0\r\n" in last
        assert b'"reason":"requests_per_minute"' in last
        remaining = re.findall(rb"x-ratelimit-remaining-requests: (\d+)", client.received)
        assert remaining == [b"%d" % max(0, n) for n in range(7, -2, -1)]
        world.wait(59)
        second = world.connect_client()
        world.client_sends(second, request())
        assert statuses(second) == [429]
        world.wait(2)
        third = world.connect_client()
        world.client_sends(third, request())
        world.worker_responds(OK_RESPONSE)
        assert statuses(third) == [200]

    play(listeners, script, keys("requests_per_minute = 8\n"), began=2)


def test_requests_in_flight_above_the_limit_get_429_at_once(listeners):
    def script(world, client):
        others = [world.connect_client() for _ in range(3)]
        world.client_sends(client, request())
        for other in others:
            world.client_sends(other, request())
        assert [statuses(other) for other in others] == [[], [429], [429]]
        assert b"retry-after: 1\r\n" in others[1].received
        assert callers(world)["team-a"].in_flight == 2
        other_caller = world.connect_client()
        world.client_sends(other_caller, request(b"key-b"))  # has its own limit
        for _ in range(3):
            world.worker_responds(OK_RESPONSE)
        assert statuses(client) == statuses(others[0]) == statuses(other_caller) == [200]
        assert callers(world)["team-a"].in_flight == 0
        world.client_sends(client, request())
        world.worker_responds(OK_RESPONSE)
        assert statuses(client) == [200, 200]

    config = keys("max_inflight = 2\n", "max_inflight = 2\n", more="queue_size = 9")
    play(listeners, script, config, began={0, 1, 2})


def test_a_client_that_disconnects_releases_its_slot(listeners):
    def script(world, client):
        world.client_sends(client, request())
        assert callers(world)["team-a"].in_flight == 1
        client.disconnect()
        world.run_until_idle()
        assert callers(world)["team-a"].in_flight == 0

    play(listeners, script, keys("max_inflight = 1\n"))


MODEL = b'{"model": "%b", "messages": []}'


def test_a_model_that_the_key_does_not_allow_is_403(listeners):
    def script(world, client):
        warm_up(world, client, request(body=MODEL % b"m"))
        for model in (b"m", b"n"):
            world.client_sends(client, request(body=MODEL % model))
            world.worker_responds(OK_RESPONSE)
        # A request without a model might be served by a worker of any model.
        world.client_sends(client, request())
        assert statuses(client) == [200] * 7 + [403] * 2
        assert client.received.count(b"model_not_allowed") == 2
        assert callers(world)["team-a"].in_flight == 0

    play(listeners, script, keys('models = ["m", "alias"]\n'), began=1)


MODEL_PART = b'--X\r\nContent-Disposition: form-data; name="model"\r\n\r\n%b\r\n'


@pytest.mark.parametrize(
    ("body", "allowed"),
    [
        (b'{"model": "m", "lora_path": "z"}', False),
        (b'{"model": "m", "lora_path": ["a", "z"]}', False),
        (b'{"model": "m", "lor\\u0061_path": "z"}', False),
        (b'{"model": "m", "lora_path": "a", "lora_path": "z"}', False),
        (b'{"model": "m:z"}', False),
        (b'{"model": "m", "lora_path": "a"}', True),
        (b'{"model": "m", "lora_path": ["a", null]}', True),
        (b'{"model": "m", "lora_path": null}', True),
        (b'{"model": "m", "lora_path": "b"}', True),
        (b'{"model": "m:a"}', True),
        (b'{"model": "m", "text": "\\u00e9"}', True),
    ],
)
def test_the_key_must_allow_the_adapter_too(listeners, body, allowed):
    def script(world, client):
        world.client_sends(client, request(body=body))
        if allowed:
            world.worker_responds(OK_RESPONSE)
            world.run_until_idle()
        assert statuses(client) == [200 if allowed else 403]

    play(listeners, script, keys('models = ["m", "a", "m:b"]\n'), began={0, 1})


def test_a_form_with_two_models_is_rejected_if_the_key_restricts_models(listeners):
    def form(*models):
        body = b"".join(MODEL_PART % model for model in models) + b"--X--\r\n"
        head = b"POST /v1/audio/transcriptions HTTP/1.1\r\nhost: a\r\n" + bearer(KEYS[0])
        content_type = b"content-type: multipart/form-data; boundary=X\r\n"
        return b"%b\r\n%bcontent-length: %d\r\n\r\n%b" % (head, content_type, len(body), body)

    def script(world, client):
        world.client_sends(client, form(b"m"))
        world.worker_responds(OK_RESPONSE)
        for models in ((b"m", b"n"), (b"n", b"m"), (b"n",)):
            world.client_sends(client, form(*models))
        assert statuses(client) == [200, 400, 400, 403]
        assert client.received.count(b"duplicate_key") == 2
        assert callers(world)["team-a"].in_flight == 0

    play(listeners, script, keys('models = ["m"]\n'), began={0, 1})


USAGE = b'{"choices": [], "usage": {"prompt_tokens": 30, "completion_tokens": 40}}'
RESPONSE_WITH_USAGE = (
    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
    % (
        len(USAGE),
        USAGE,
    )
)


def test_the_usage_of_a_response_replaces_the_reserved_tokens(listeners):
    body = b'{"max_tokens": 90, "messages": []}'  # counts as 9 for its bytes, and 90

    def script(world, client):
        world.client_sends(client, request(body=body))
        assert callers(world)["team-a"].tokens_used(world.clock()) == 99
        world.worker_responds(RESPONSE_WITH_USAGE)
        assert callers(world)["team-a"].tokens_used(world.clock()) == 70
        assert b"x-ratelimit-remaining-tokens: 1\r\n" in client.received
        world.client_sends(client, request(body=body))
        assert statuses(client) == [200, 429]
        assert b"x-ratelimit-limit-tokens: 100\r\n" in client.received
        assert b'"reason":"tokens_per_minute"' in client.received

    play(listeners, script, keys("tokens_per_minute = 100\n"), began={0, 1})


def test_requests_are_rejected_while_more_tokens_than_the_limit_are_used(listeners):
    def script(world, client):
        world.client_sends(client, request())
        world.worker_responds(RESPONSE_WITH_USAGE)
        world.client_sends(client, request())
        assert statuses(client) == [200, 429]
        world.wait(61)
        second = world.connect_client()
        world.client_sends(second, request())
        world.worker_responds(RESPONSE_WITH_USAGE)
        assert statuses(second) == [200]

    play(listeners, script, keys("tokens_per_minute = 50\n"), began={0, 1})


def test_the_chunks_of_a_stream_without_usage_are_counted(listeners):
    body = b'{"messages": [], "stream": true}'  # 8 tokens by its bytes

    def script(world, client):
        world.client_sends(client, request(body=body))
        events = [encode_chunk(b"data: %d\n\n" % n) for n in range(3)]
        world.worker_responds(STREAM_HEAD, *events, b"0\r\n\r\n")
        for _ in range(4):
            world.worker_continues()
        used = callers(world)["team-a"].tokens_used(world.clock())
        assert 8 + 3 <= used <= 8 + 4

    play(listeners, script, keys("tokens_per_minute = 100\n"), began=0)


def test_a_failed_request_costs_no_tokens(listeners):
    error = b"HTTP/1.1 500 No\r\ncontent-length: 1\r\n\r\nx"

    def script(world, client):
        world.client_sends(client, request())
        world.worker_responds(error)
        assert statuses(client) == [500]
        assert callers(world)["team-a"].tokens_used(world.clock()) == 0

    play(listeners, script, keys("tokens_per_minute = 100\n"), began=0)


def response_with(body):
    return OK_RESPONSE.replace(b": 2\r\n\r\n{}", b": %d\r\n\r\n%b" % (len(body), body))


@pytest.mark.parametrize(
    ("body", "used"),
    [
        (USAGE, (30, 40)),
        (USAGE[:-1] + b', "metadata": {"weight_version": "3"}}', (30, 40)),
        (b'{"usage": {"input_tokens": 5, "output_tokens": 6}, "a": 1}', (5, 6)),
        (b'{"data": [], "usage": {"prompt_tokens": 5, "total_tokens": 5}}', (5, 0)),
        (b'{"usage": {"prompt_tokens": -1, "completion_tokens": 2}}', (0, 2)),
        (b'{"x": "no usage at all, 40 bytes, 10 tokens"}  ', (4, 11)),
        (b'{"usage": null, "x": "the same, with a null"}  ', (4, 11)),
    ],
)
@pytest.mark.parametrize("limit", ["", "tokens_per_minute = 1000\n"])
def test_tokens_are_counted_for_every_form_of_usage(listeners, body, used, limit):
    def script(world, client):
        warm_up(world, client)
        caller = callers(world)["team-a"]
        rows = world.dataplane.settings.callers._rows

        def counts():
            caller.publish()
            totals = slot_totals([rows.own(caller.slot)])
            return [totals[name] for name in ("requests", "input_tokens", "output_tokens")]

        earlier, before = counts(), (caller.in_flight, caller.tokens_used(world.clock()))
        for _ in range(2):
            world.client_sends(client, request())
            world.worker_responds(response_with(body))
        assert statuses(client) == [200] * 8
        added = [now - then for now, then in zip(counts(), earlier, strict=True)]
        assert added == [2, 2 * used[0], 2 * used[1]]
        settled = 2 * sum(used) if limit else 0
        assert (caller.in_flight, caller.tokens_used(world.clock())) == (
            before[0], before[1] + settled,
        )  # fmt: skip

    play(listeners, script, keys(limit), began={1, 2})


def test_rate_limit_headers_are_exposed_to_other_origins(listeners):
    fields = (bearer(KEYS[0]), b"origin: https://app.example")

    def script(world, client):
        world.client_sends(client, chat_request(fields=fields))
        world.worker_responds(OK_RESPONSE)
        exposed = re.search(rb"access-control-expose-headers: ([^\r]*)", client.received)[1].split(
            b", "
        )
        sent = set(re.findall(rb"\r\n(x-ratelimit-[a-z-]+):", client.received))
        assert len(sent) == 6
        assert sent <= set(exposed)

    limits = "requests_per_minute = 9\ntokens_per_minute = 999\n"
    play(listeners, script, keys(limits, more="cors_allow_origins = ['*']"))


@pytest.mark.parametrize(
    ("body", "count"),
    [
        (b'{"max_tokens": 64}', 64),
        (b'{"max_completion_tokens":7,"messages":[]}', 7),
        (b'{"sampling_params":{"max_new_tokens" : 9}}', 9),
        (b'{"max_output_tokens":5}', 5),
        (b'{"max_tokens":null}', 0),
        (b'{"prompt":"say \\"max_tokens\\": 99"}', 0),
        (b"", 0),
    ],
)
def test_the_limit_of_completion_tokens_is_read_from_the_body(body, count):
    assert max_tokens_in(body) == count
