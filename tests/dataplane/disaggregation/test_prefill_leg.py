import pytest

from omni_proxy.dataplane.disaggregation.prefill_leg import is_transfer_event, names_transfer


@pytest.mark.parametrize(
    ("status", "body", "transfer"),
    [
        (500, b"KVTransferError: the session is dead", True), (503, b"NIXL handshake failed", True),
        (502, b"bootstrap room not found", True), (500, b"out of memory", False),
        (400, b"bootstrap_room must be a number", False), (200, b"kv_transfer_params", False),
    ],
)  # fmt: skip
def test_a_transfer_error_is_recognized_by_its_status_and_message(status, body, transfer):
    assert names_transfer(status, body) == transfer


@pytest.mark.parametrize(
    ("events", "transfer"),
    [
        (b'data: {"error": {"message": "KVTransferError"}}\n\n', True),
        (b'data: {"text": "a story of a bootstrap"}\n\n', False),
        (b'data: {"error": {"message": "out of memory"}}\n\n', False),
        (b'data: {"error": null, "text": "the bootstrap of a compiler"}\n\n', False),
    ],
)
def test_an_error_event_of_a_transfer_is_recognized(events, transfer):
    assert is_transfer_event(events) == transfer
