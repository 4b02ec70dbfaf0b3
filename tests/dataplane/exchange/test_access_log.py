"""Access log and route log lines with text that clients choose."""

import json

import msgspec
import pytest

from omni_proxy.dataplane.exchange.access_log import access_text, write_logs
from omni_proxy.dataplane.exchange.exchange import Exchange, Recorders
from omni_proxy.routing.inspect.requirements import Requirements
from tests.fleet.entries import entry, fleet_of

# CSI in 8 bits, NEL, line separator, right-to-left override, zero-width space, a tag, DEL
ODD = "m\x9b\x85\u2028\u202e\u200b\U000e0041\x7fé"


class Sink:
    def __init__(self):
        self.lines = []

    def write(self, line):
        self.lines.append(line)


@pytest.fixture
def recorders():
    to_sinks = Recorders()
    to_sinks.access_log, to_sinks.route_log = Sink(), Sink()
    return to_sinks


@pytest.fixture
def exchange():
    ended = Exchange(1.0, "127.0.0.1:9")
    ended.method, ended.target, ended.ended_at = "POST", "/v1/chat/completions", 2.0
    ended.requirements = Requirements(model=ODD, mask=0)
    ended.worker_seen = ("healthy", False, True)
    return ended


@pytest.mark.parametrize("access_json", [True, False])
def test_the_logs_have_no_unprintable_characters(exchange, recorders, access_json):
    write_logs(recorders, exchange, fleet_of(entry("a")).workers[0], as_json=access_json)
    (route,), (access,) = recorders.route_log.lines, recorders.access_log.lines
    assert route.isascii()
    assert route.decode().isprintable()
    assert json.loads(route)["model"] == ODD
    assert access.decode().isprintable()
    if access_json:
        assert access.isascii()
        assert json.loads(access)["model"] == ODD
    else:
        assert "é" in access.decode()
        assert "\\u202e" in access.decode()


def test_a_text_line_can_be_made_of_a_json_record(exchange, recorders):
    write_logs(recorders, exchange, None, as_json=True)
    record = msgspec.json.decode(recorders.access_log.lines[0])
    assert record["model"] == ODD
    assert access_text(recorders.access_log.lines[0]).decode().isprintable()
