import threading

import pytest

from omni_proxy.process_group.broadcast.transfer import ReceiveOrder, Transfer
from omni_proxy.process_group.tensor_plan import GroupError, parse_plans
from tests.process_group.receiver_steps import TENSORS, arm, body_of, join_group, leave_group

PATIENCE_SECS = 20


@pytest.fixture
def transfer():
    return Transfer(
        ReceiveOrder(parse_plans(body_of(TENSORS[:2], TENSORS[2:3], TENSORS[4:]))), lambda _: None
    )


def start_waiting(transfer, buckets):
    """Starts a thread that waits for more than `buckets`. Returns it, and a list for its result."""
    results = []
    thread = threading.Thread(
        target=lambda: results.append(transfer.wait_past(buckets, PATIENCE_SECS).buckets_done)
    )
    thread.start()
    return thread, results


def test_wait_past_returns_at_the_next_bucket(transfer):
    transfer.report_progress(2, 37)
    assert transfer.wait_past(0, PATIENCE_SECS).buckets_done == 1
    thread, results = start_waiting(transfer, 1)
    transfer.report_progress(2, 39)  # bytes of the second bucket
    assert transfer.wait_past(1, 0).bytes_received == 39
    transfer.report_progress(3, 41)
    thread.join(PATIENCE_SECS)
    assert results == [2]


@pytest.mark.parametrize(
    ("end", "done"),
    [
        (lambda transfer: transfer.finish("all"), 3),
        (lambda transfer: transfer.fail(GroupError("it died")), 1),
    ],
)
def test_the_end_of_a_transfer_wakes_wait_past(transfer, end, done):
    transfer.report_progress(2, 37)
    thread, results = start_waiting(transfer, 1)
    end(transfer)
    thread.join(PATIENCE_SECS)
    assert results == [done]
    assert transfer.wait_past(3, PATIENCE_SECS).buckets_done == done


def test_a_bucket_is_reported_before_the_next_arrives(receiver, trainer):
    join_group(receiver, trainer)
    transfer = arm(receiver, TENSORS[:2], TENSORS[4:])
    trainer.tell("send", group="g", tensors=TENSORS[:2])
    assert transfer.wait_past(0, PATIENCE_SECS).buckets_done == 1
    trainer.tell("send", group="g", tensors=TENSORS[4:])
    assert transfer.wait_past(1, PATIENCE_SECS).buckets_done == 2
    transfer.wait(PATIENCE_SECS).close()
    leave_group(receiver, trainer)
