import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import torch

from omni_proxy.process_group.rank_protocol import GroupError, GroupLimits, Groups, Rendezvous
from tests.process_group.trainer_process import free_port
from tests.process_group.wait_helpers import wait_until

SPECS = [("a.weight", "float32", [2, 3])]
TENSORS = [("float32", [2, 3], 1)]


@pytest.fixture
def groups():
    groups = Groups(GroupLimits(stall_secs=5.0, silent_secs=10.0, ping_secs=1.0))
    yield groups
    groups.close()


def rendezvous(port, name="g", **changes):
    defaults = {"master_address": "127.0.0.1", "rank": 1, "world_size": 2, "backend": "gloo"}
    return Rendezvous(
        **{**defaults, "timeout_s": 20.0, **changes}, master_port=port, group_name=name
    )


def join_group(groups, trainer, name="g", *, form="raw", host="127.0.0.1", **changes):
    port = trainer.tell("open", group=name, form=form, host=host)["port"]
    groups.init(rendezvous(port, name, **{"master_address": host, **changes}))
    assert trainer.reply() == {"joined": True}
    return port


def can_transfer(groups, trainer, name="g"):
    trainer.order("send", group=name, tensors=TENSORS)
    received = groups.receive(name, SPECS)
    assert len(trainer.reply()["sent"]) == 1
    return received["a.weight"].shape == (2, 3)


def leave_group(groups, trainer, name="g"):
    groups.destroy(name)
    assert trainer.tell("destroy", group=name) == {"destroyed": True}


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0)
        yield listener


@pytest.mark.parametrize("form", ["raw", "helper", "rendezvous"])
def test_a_group_forms_with_each_kind_of_trainer_group(groups, trainer, form):
    join_group(groups, trainer, form=form)
    (group,) = groups.status()["groups"]
    assert group["state"] == "ready"
    assert not group["owner_gone"]
    assert can_transfer(groups, trainer)
    leave_group(groups, trainer)
    assert groups.status()["groups"] == []


def test_the_group_is_not_registered_in_torch(groups, trainer):
    join_group(groups, trainer)
    assert not torch.distributed.is_initialized()
    # Where torch 2 registers groups; it has no public list of them.
    assert not torch.distributed.distributed_c10d._world.pg_names
    leave_group(groups, trainer)


def test_the_port_may_be_a_numeric_string_and_the_address_a_host_name(groups, trainer):
    port = trainer.tell("open", group="g")["port"]
    groups.init(rendezvous(f" {port} ", master_address="localhost"))
    assert trainer.reply() == {"joined": True}
    leave_group(groups, trainer)


@pytest.mark.skipif(not os.path.exists("/proc/net/if_inet6"), reason="no IPv6 here")
def test_the_address_may_be_an_ipv6_address_in_brackets(groups, trainer):
    port = trainer.tell("open", group="g", host="::1")["port"]
    groups.init(rendezvous(port, master_address="[::1]"))
    assert trainer.reply() == {"joined": True}
    assert groups.status()["groups"][0]["owner"] == f"[::1]:{port}"
    leave_group(groups, trainer)


def test_a_rank_waits_for_a_trainer_that_has_not_started_yet(groups, trainer):
    port = free_port()
    with ThreadPoolExecutor(1) as threads:
        init = threads.submit(groups.init, rendezvous(port))
        wait_until(lambda: groups.status()["groups"])
        trainer.order("open", group="g", port=port)
        init.result()
    assert trainer.reply() == {"port": port}
    assert trainer.reply() == {"joined": True}
    leave_group(groups, trainer)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": 0}, "rank 0 is the trainer"),
        ({"rank": 4, "world_size": 4}, "it must be 1 to 3"),
        ({"rank": -1}, "rank -1"),
        ({"rank": "1"}, "rank must be an integer"),
        ({"world_size": 1}, "world_size 1"),
        ({"world_size": True}, "world_size must be an integer"),
        ({"backend": "mpi"}, "'mpi'"),
        ({"master_address": "[]"}, "master_address"),
        ({"timeout_s": 0.0}, "timeout"),
        ({"timeout_s": float("nan")}, "timeout"),
        ({"timeout_s": 1e300}, "timeout"),
    ],
)
def test_an_invalid_rendezvous_is_refused_before_a_connection_is_opened(
    groups, listener, changes, message
):
    with pytest.raises(GroupError, match="(?s)" + message.replace("[", r"\[")):
        groups.init(rendezvous(listener.getsockname()[1], **changes))
    with pytest.raises(BlockingIOError):
        listener.accept()
    assert groups.status()["groups"] == []


@pytest.mark.parametrize("port", [0, 65536, "port", "", "-1", None, True, 1.5, "²"])
def test_an_invalid_port_is_refused(groups, port):
    with pytest.raises(GroupError, match="master_port must be a port"):
        groups.init(rendezvous(port))


def test_a_group_needs_a_name(groups):
    with pytest.raises(GroupError, match="group_name"):
        groups.init(rendezvous(1, ""))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_nccl_without_a_gpu_is_refused_at_once(groups, listener):
    with pytest.raises(GroupError, match="needs a CUDA device"):
        groups.init(rendezvous(listener.getsockname()[1], backend="nccl"))
    with pytest.raises(BlockingIOError):
        listener.accept()


def test_a_refused_connection_is_an_error_after_the_timeout(groups):
    port = free_port()
    with pytest.raises(GroupError, match=f"waiting for the trainer's store at 127.0.0.1:{port}"):
        groups.init(rendezvous(port, timeout_s=0.5))
    wait_until(lambda: not groups.status()["abandoned_threads"])


def test_a_name_that_does_not_resolve_fails_at_once(groups):
    with pytest.raises(GroupError, match=r"'no\.such\.host\.invalid' does not resolve"):
        groups.init(rendezvous(1, master_address="no.such.host.invalid"))


def test_a_silent_port_leaves_no_thread(listener):
    groups = Groups(GroupLimits(silent_secs=0.4))
    before = threading.active_count()
    with pytest.raises(GroupError, match="no torch store answered"):
        groups.init(rendezvous(listener.getsockname()[1]))
    assert groups.status() == {"groups": [], "abandoned_threads": [], "kept_bytes": 0}
    wait_until(lambda: threading.active_count() <= before)


def test_a_service_that_is_not_a_store_is_reported(groups, listener):
    listener.settimeout(10)

    def respond():
        connection, _ = listener.accept()
        with connection:
            connection.recv(1)
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            # The client disconnects when it has read enough.
            with suppress(ConnectionResetError):
                while connection.recv(1 << 16):
                    pass

    with ThreadPoolExecutor(1) as threads:
        responding = threads.submit(respond)
        with pytest.raises(GroupError, match="speaks another protocol"):
            groups.init(rendezvous(listener.getsockname()[1]))
        responding.result()


def test_a_missing_rank_ends_the_rendezvous_and_its_thread(groups, trainer):
    port = trainer.tell("open", group="g", world=3, timeout=2.0)["port"]
    with pytest.raises(GroupError, match="waiting for all 3 ranks"):
        groups.init(rendezvous(port, world_size=3, timeout_s=1.0))
    assert groups.status()["groups"] == []
    assert "fault" in trainer.reply()
    wait_until(lambda: not groups.status()["abandoned_threads"])
    join_group(groups, trainer)
    leave_group(groups, trainer)


def test_a_trainer_that_dies_during_the_rendezvous_ends_it_at_once(groups, trainer):
    port = trainer.tell("open", group="g", world=3)["port"]
    with ThreadPoolExecutor(1) as threads:
        # Short, so that the abandoned thread returns before the tests of this file end.
        init = threads.submit(groups.init, rendezvous(port, world_size=3, timeout_s=6.0))
        wait_until(lambda: groups.status()["groups"] and _connected(groups))
        trainer.kill()
        with pytest.raises(GroupError, match=r"trainer at .* has gone|no group, while waiting"):
            init.result()
    assert groups.status()["groups"] == []


def _connected(groups):
    # Nothing public tells it: `status` of a group that has not formed is the same before and after.
    return groups._groups["g"].connection is not None


@pytest.mark.parametrize(
    ("end", "message"),
    [(lambda groups: groups.destroy("g"), "'g' was destroyed"), (Groups.close, "destroyed")],
)
def test_a_rendezvous_can_be_ended_from_another_thread(groups, end, message):
    with ThreadPoolExecutor(1) as threads:
        init = threads.submit(groups.init, rendezvous(free_port()))
        wait_until(lambda: groups.status()["groups"])
        end(groups)
        with pytest.raises(GroupError, match=message):
            init.result()
    wait_until(lambda: not groups.status()["abandoned_threads"])


def test_no_group_can_be_joined_after_close(groups):
    groups.close()
    with pytest.raises(GroupError, match="shutting down"):
        groups.init(rendezvous(free_port()))


def test_a_second_group_of_a_name_is_refused_while_its_trainer_is_alive(groups, trainer):
    port = join_group(groups, trainer)
    with pytest.raises(GroupError, match=f"'g' is ready for the trainer at 127.0.0.1:{port}"):
        groups.init(rendezvous(free_port()))
    assert can_transfer(groups, trainer)
    leave_group(groups, trainer)


def test_a_group_whose_trainer_has_ended_is_replaced(groups, pool):
    first = pool.trainer()
    join_group(groups, first)
    first.kill()
    second = pool.trainer()
    join_group(groups, second)
    assert can_transfer(groups, second)
    leave_group(groups, second)


def test_two_groups_with_different_names_are_independent(groups, trainer):
    join_group(groups, trainer, "one")
    join_group(groups, trainer, "two", form="helper")
    assert can_transfer(groups, trainer, "two")
    assert can_transfer(groups, trainer, "one")
    leave_group(groups, trainer, "one")
    assert can_transfer(groups, trainer, "two")
    leave_group(groups, trainer, "two")


def test_a_group_that_does_not_exist_cannot_be_destroyed(groups, trainer):
    with pytest.raises(GroupError, match=r"^The group to be destroyed does not exist\.$"):
        groups.destroy("g")
    join_group(groups, trainer)
    leave_group(groups, trainer)
    with pytest.raises(GroupError, match="does not exist"):
        groups.destroy("g")


def test_repeated_groups_of_one_name_leak_no_file_and_no_thread(groups, trainer):
    def run_sync():
        join_group(groups, trainer)
        assert can_transfer(groups, trainer)
        leave_group(groups, trainer)

    run_sync()
    files, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(5):
        run_sync()
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= files)
    wait_until(lambda: threading.active_count() <= threads)
    assert groups.status()["abandoned_threads"] == []


def test_a_rank_without_its_own_gpu_is_refused_with_the_reason(groups, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    with pytest.raises(GroupError, match="rank 1 of this replica needs its own GPU 1, but only 1 "):
        groups.init(rendezvous(1, backend="nccl", device=1))
