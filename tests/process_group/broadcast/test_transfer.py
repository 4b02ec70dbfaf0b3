import threading

import pytest

from omni_proxy.process_group.broadcast.transfer import ReceiveOrder, Transfer
from omni_proxy.process_group.tensor_plan import GroupError, parse_plans
from tests.process_group.receiver_steps import TENSORS, armed, body_of, joined, left

SOON_SECS = 20


@pytest.fixture
def transfer():
    return Transfer(
        ReceiveOrder(parse_plans(body_of(TENSORS[:2], TENSORS[2:3], TENSORS[4:]))), lambda _: None
    )


def waiting(transfer, buckets):
    """Somebody who waits for more than these, and what he gets."""
    found = []
    thread = threading.Thread(
        target=lambda: found.append(transfer.wait_past(buckets, SOON_SECS).buckets_done)
    )
    thread.start()
    return thread, found


def test_wait_past_returns_at_the_next_bucket(transfer):
    transfer.report_progress(2, 37)
    assert transfer.wait_past(0, SOON_SECS).buckets_done == 1
    thread, found = waiting(transfer, 1)
    transfer.report_progress(2, 39)  # bytes of the second
    assert transfer.wait_past(1, 0).bytes_received == 39
    transfer.report_progress(3, 41)
    thread.join(SOON_SECS)
    assert found == [2]


@pytest.mark.parametrize(
    ("end", "done"),
    [
        (lambda transfer: transfer.finish("all"), 3),
        (lambda transfer: transfer.fail(GroupError("it died")), 1),
    ],
)
def test_the_end_of_a_transfer_wakes_wait_past(transfer, end, done):
    transfer.report_progress(2, 37)
    thread, found = waiting(transfer, 1)
    end(transfer)
    thread.join(SOON_SECS)
    assert found == [done]
    assert transfer.wait_past(3, SOON_SECS).buckets_done == done


def test_a_bucket_is_reported_before_the_next_arrives(receiver, trainer):
    joined(receiver, trainer)
    transfer = armed(receiver, TENSORS[:2], TENSORS[4:])
    trainer.tell("send", group="g", tensors=TENSORS[:2])
    assert transfer.wait_past(0, SOON_SECS).buckets_done == 1
    trainer.tell("send", group="g", tensors=TENSORS[4:])
    assert transfer.wait_past(1, SOON_SECS).buckets_done == 2
    transfer.wait(SOON_SECS).close()
    left(receiver, trainer)
