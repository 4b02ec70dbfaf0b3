import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.fleet.worker import Worker, capability_mask
from omni_proxy.routing.inspect.requirements import Requirements
from omni_proxy.routing.routes import NAMED, RESPONSE_OWNER, UNPINNED
from omni_proxy.routing.stored_responses import (
    SCANNED_BYTES,
    ResponseIdScanner,
    named_response,
    own_response_owners,
    pin_to_response_owner,
)
from tests.fleet.entries import NOW, entry


def scanned(*chunks):
    found = []
    scanner = ResponseIdScanner(found.append)
    for chunk in chunks:
        scanner.scan(chunk)
    return found


UNARY = b'{"id":"resp_1","object":"response","output":[{"id":"msg_2"}]}'
FIRST = b'event: response.created\ndata: {"type":"response.created","response":{"id":"resp_1",'


@pytest.mark.parametrize(
    "chunks",
    [
        [UNARY],
        [b'{ "id" : "resp_1" }'],
        [FIRST, b'data: {"id": "other"}'],
        [b"", UNARY],
        [b"2f\r\n" + FIRST],
        [b'{"output":[{"id":"msg_2"}],"id":"resp_1"}'],
    ],
)
def test_the_id_of_a_response_is_found_in_its_first_bytes(chunks):
    assert scanned(*chunks) == ["resp_1"]


@given(st.integers(0, len(UNARY)))
def test_an_id_that_is_cut_in_two_is_found_whole_or_as_another_never(at):
    assert scanned(UNARY[:at], UNARY[at:]) == ["resp_1"]


def test_an_id_of_another_form_is_taken_too():
    assert scanned(b'{"id":"mine"}') == ["mine"]


def test_only_the_beginning_is_looked_through():
    assert scanned(b"x" * SCANNED_BYTES, UNARY) == []


@given(st.lists(st.binary(max_size=200)))
def test_any_bytes_are_accepted(chunks):
    assert len(scanned(*chunks)) <= 1


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/v1/responses/resp_1", b"", "resp_1"),
        ("/v1/responses/resp_1/cancel", b"", "resp_1"),
        ("/v1/responses/a%2Fb", b"", "a/b"),
        ("/v1/responses", b'{"previous_response_id": "resp_1"}', "resp_1"),
        ("/v1/responses", b'{"previous_response_id": null}', ""),
        ("/v1/responses", b'{"previous_response_id": 7}', ""),
        ("/v1/responses", b'{"input": "a"}', ""),
        ("/v1/responses", b"no json", ""),
        ("/v1/responses", b"", ""),
    ],
)
def test_a_request_names_a_response_by_path_or_body(path, body, named):
    assert named_response(path, body) == named


def test_a_request_takes_the_owner_or_any_worker():
    owners, worker = own_response_owners(), Worker(entry("a"), NOW)
    owners.keep("resp_1", worker, 0.0)
    for response_id, place in (("resp_1", NAMED), ("resp_2", UNPINNED), ("", UNPINNED)):
        need = Requirements(capability_mask(["chat"]), pinning=RESPONSE_OWNER)
        pin_to_response_owner(need, response_id, owners, 1.0)
        assert need.pinning is place
        assert need.named_worker == (worker.url if place is NAMED else "")


def test_the_table_is_bounded():
    owners, worker = own_response_owners(), Worker(entry("a"), NOW)
    owners.tune(10, 0)
    for number in range(50):
        owners.keep(json.dumps(number), worker, 0.0)
    assert len(owners) == 10
    assert owners.find("49", 0.0) is worker
    assert owners.find("0", 0.0) is None
