import os
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from omni_proxy.process_group.fork import child_process, subprocess_receiver
from omni_proxy.process_group.receiver import GroupError, GroupLimits, open_receiver
from omni_proxy.process_group.tensor_plan import parse_plans
from tests.process_group.receiver_steps import (
    LIMITS,
    TENSORS,
    arm,
    body_of,
    join_group,
    recovers,
    wait_until_bytes_move,
)
from tests.process_group.trainer_process import Trainer
from tests.process_group.wait_helpers import run_within, wait_until
from tests.processes import alive

BIG_BYTES = 384 << 20


@pytest.mark.parametrize("isolation", ["process"], indirect=True)
def test_a_trainer_that_sends_too_little_is_detected(receiver, trainer, pool):
    join_group(receiver, trainer)
    transfer = arm(receiver, [("float32", [8], 1)], [("float32", [8], 2)])
    trainer.order("send", group="g", tensors=[("float32", [8], 1), ("float32", [6], 2)])
    with pytest.raises(GroupError, match=r"'layer\.1\.0' was announced with 32 bytes") as failure:
        transfer.wait(20)
    assert failure.value.group_dropped
    trainer.reply()
    trainer.tell("destroy", group="g")
    assert recovers(receiver, pool)


@pytest.mark.parametrize("isolation", ["process"], indirect=True)
def test_a_trainer_that_sends_too_much_ends_only_its_group(receiver, pool):
    trainer = pool.trainer()
    join_group(receiver, trainer)
    transfer = arm(receiver, [("float32", [8], 1)])
    trainer.order("send", group="g", tensors=[("float32", [800], 1)])
    with pytest.raises(GroupError, match="sent more bytes than it announced") as failure:
        transfer.wait(20)
    assert failure.value.group_dropped
    assert str(transfer.fault()) == str(failure.value)
    trainer.kill()
    assert recovers(receiver, pool)


def test_a_trainer_that_dies_before_its_first_byte_is_noticed(receiver, pool):
    trainer = pool.trainer()
    join_group(receiver, trainer)
    transfer = arm(receiver, [("float32", [8], 1)])
    trainer.kill()
    wait_until(lambda: transfer.fault() is not None)  # noticed without a call of wait()
    with pytest.raises(GroupError, match=r"Connection (closed|reset)|trainer has gone"):
        transfer.wait(0)
    with pytest.raises(GroupError, match=r"'g' is gone \(.*init_weights_update_group again"):
        arm(receiver, [("float32", [8], 1)])
    receiver.destroy("g")  # a group that a failure dropped may be destroyed once
    with pytest.raises(GroupError, match="does not exist"):
        receiver.destroy("g")
    assert recovers(receiver, pool)


@pytest.mark.parametrize("isolation", ["process"], indirect=True)
def test_a_stopped_child_that_reads_no_command_is_killed_and_replaced(receiver, pool, monkeypatch):
    monkeypatch.setattr(child_process, "SEND_SECS", 0.5)
    trainer = pool.trainer()
    join_group(receiver, trainer)
    child = receiver.status()["groups"][0]["process"]
    os.kill(child, signal.SIGSTOP)
    tensors = [("uint8", [1], 1)] * 6000
    with pytest.raises(GroupError, match=r"hangs: it read no command for 0\.5 s") as failure:
        run_within(30, lambda: arm(receiver, tensors))
    assert failure.value.group_dropped
    assert receiver.status()["groups"] == []
    wait_until(lambda: not alive(child))
    trainer.kill()
    assert recovers(receiver, pool)


def test_a_group_whose_trainer_has_died_cannot_be_armed(receiver, pool):
    trainer = pool.trainer()
    join_group(receiver, trainer)
    trainer.kill()
    wait_until(lambda: receiver.status()["groups"][0]["owner_gone"])
    with pytest.raises(GroupError, match="the trainer has gone") as refusal:
        arm(receiver, [("float32", [8], 1)])
    assert refusal.value.group_dropped
    assert receiver.status()["groups"] == []


@pytest.mark.parametrize("isolation", ["process"], indirect=True)
def test_a_trainer_that_dies_during_a_transfer_is_noticed(receiver, pool):
    trainer = pool.trainer()
    join_group(receiver, trainer)
    transfer = arm(receiver, [("uint8", [BIG_BYTES], 0)], digests=True)
    trainer.order("send_zeros", group="g", nbytes=BIG_BYTES)
    wait_until_bytes_move(transfer)
    trainer.kill()
    with pytest.raises(GroupError, match=r"trainer has gone|closed by peer|reset by peer"):
        transfer.wait(20)
    assert recovers(receiver, pool)


def test_a_trainer_that_stops_during_a_transfer_causes_a_stall(pool):
    receiver = open_receiver("process", replace(LIMITS, stall_secs=1.0), name="stalled")
    trainer = pool.trainer()
    join_group(receiver, trainer)
    transfer = arm(receiver, [("uint8", [BIG_BYTES], 0)])
    trainer.order("send_zeros", group="g", nbytes=BIG_BYTES)
    wait_until_bytes_move(transfer)
    trainer.process.send_signal(signal.SIGSTOP)
    with pytest.raises(GroupError, match=r"nothing was received for 1 s") as failure:
        transfer.wait(20)
    assert failure.value.group_dropped
    trainer.kill()
    assert recovers(receiver, pool)
    receiver.close()


def test_a_transfer_completes_if_the_trainer_exits_after_the_last_byte(receiver, pool):
    trainer = Trainer()
    join_group(receiver, trainer)
    transfer = arm(receiver, [("float32", [400], 1)])
    trainer.tell("send", group="g", tensors=[("float32", [400], 1)])
    trainer.close()
    received = transfer.wait(20)
    assert received.nbytes == 1600
    received.close()


@pytest.mark.parametrize("isolation", ["thread"], indirect=True)
def test_a_wait_that_times_out_disarms_the_group(receiver, trainer, pool):
    join_group(receiver, trainer)
    transfer = arm(receiver, [("float32", [8], 1)])
    with pytest.raises(GroupError, match=r"not complete within 0\.2 s") as failure:
        transfer.wait(0.2)
    assert failure.value.group_dropped
    assert receiver.status()["groups"] == []
    trainer.tell("destroy", group="g")
    assert recovers(receiver, pool)


@pytest.mark.parametrize("isolation", ["process"], indirect=True)
def test_an_abort_ends_a_waiting_call_with_its_reason(receiver, trainer):
    join_group(receiver, trainer)
    transfer = arm(receiver, [("float32", [8], 1)])
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(transfer.wait, 20)
        transfer.abort("another rank refused")
        with pytest.raises(GroupError, match="another rank refused"):
            waiting.result()
    with pytest.raises(GroupError, match=r"gone.*another rank refused"):
        arm(receiver, [("float32", [8], 1)])
    trainer.tell("destroy", group="g")


@pytest.mark.parametrize("isolation", ["process"], indirect=True)
def test_a_receive_that_is_not_armed_in_time_is_disarmed(receiver, trainer, monkeypatch):
    monkeypatch.setattr(subprocess_receiver, "REPORT_GRACE_SECS", 0.1)
    join_group(receiver, trainer)
    os.kill(receiver.status()["groups"][0]["process"], signal.SIGSTOP)
    with pytest.raises(GroupError, match=r"no reply within 0\.2 s") as refusal:
        receiver.arm("g", parse_plans(body_of(TENSORS)), ready_secs=0.1)
    assert refusal.value.group_dropped
    assert receiver.status()["groups"] == []
    trainer.tell("destroy", group="g")


def test_close_ends_waiting_calls(isolation, pool):
    receiver = open_receiver(isolation, LIMITS, name="closed")
    trainer = pool.trainer()
    join_group(receiver, trainer)
    transfer = arm(receiver, [("float32", [8], 1)])
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(transfer.wait, 20)
        receiver.close()
        with pytest.raises(GroupError, match=r"closed|destroyed"):
            waiting.result()
    trainer.tell("destroy", group="g")


def test_the_first_byte_may_take_longer_than_a_stall(pool):
    receiver = open_receiver("process", GroupLimits(stall_secs=0.2, first_byte_secs=20.0), name="x")
    trainer = pool.trainer()
    join_group(receiver, trainer)
    transfer = arm(receiver, [("float32", [8], 1), ("float32", [8], 2)])
    transfer.wait_past(3, 0.5)
    assert not transfer.has_ended()
    trainer.tell("send", group="g", tensors=[("float32", [8], 1)])
    with pytest.raises(GroupError, match=r"message 2 of 2: nothing was received for 0\.2 s"):
        transfer.wait(20)
    trainer.tell("destroy", group="g")
    receiver.close()


@pytest.mark.parametrize("isolation", ["process"], indirect=True)
def test_a_killed_child_is_reported_and_replaced(receiver, trainer, pool):
    join_group(receiver, trainer)
    transfer = arm(receiver, [("float32", [8], 1)])
    os.kill(receiver.status()["groups"][0]["process"], signal.SIGKILL)
    with pytest.raises(GroupError, match=r"after 0 of 1 buckets: .* ended by SIGKILL"):
        transfer.wait(20)
    trainer.tell("destroy", group="g")
    assert recovers(receiver, pool)
