import os
import resource
import socket

import msgspec
import pytest
import trio
import trio.testing

from omni_proxy.multiprocess.ipc import (
    AckEvent,
    ClearCacheCommand,
    IpcChannel,
    ListenCommand,
    MessageFrames,
    ProcessCommand,
    ProcessEvent,
    encode_frame,
)


@pytest.fixture
async def ends():
    """Control's, and a dataplane's."""
    one, other = socket.socketpair()
    control = IpcChannel(one, msgspec.msgpack.Decoder(ProcessEvent))
    dataplane = IpcChannel(other, msgspec.msgpack.Decoder(ProcessCommand))
    yield control, dataplane
    control.close()
    dataplane.close()


async def heard(channel, count):
    got = []
    with trio.fail_after(30):
        while len(got) < count:
            got += await channel.receive()
    return got


async def test_messages_arrive_in_order_with_their_descriptors(ends, nursery, tmp_path):
    control, dataplane = ends
    nursery.start_soon(control.run_writer)
    for number in range(3):
        with (tmp_path / str(number)).open("w+b") as file:
            file.write(b"%d" % number)
            file.flush()
            assert control.send(ClearCacheCommand(number)) == 2 * number + 1
            control.send(ListenCommand(1), [file.fileno()])  # closed here before it has left
    got = await heard(dataplane, 6)
    assert got == [
        each for number in range(3) for each in (ClearCacheCommand(number), ListenCommand(1))
    ]
    for number in range(3):
        (descriptor,) = dataplane.take_descriptors()
        with os.fdopen(descriptor, "rb") as file:
            file.seek(0)
            assert file.read() == b"%d" % number


async def test_messages_sent_before_the_close_are_received(ends, nursery):
    control, dataplane = ends
    nursery.start_soon(dataplane.run_writer)
    for count in range(20_000):
        dataplane.send(AckEvent(count, 0))
    assert dataplane.waiting_bytes > 100_000
    nursery.start_soon(flush_and_shut, dataplane)
    assert [ack.count for ack in await heard(control, 20_000)] == list(range(20_000))
    assert await control.receive() == []
    assert dataplane.waiting_bytes == 0


async def flush_and_shut(channel):
    await channel.wait_flushed()
    channel.shut()


async def test_a_connection_reset_is_the_end(ends):
    control, dataplane = ends
    control.close()
    assert await dataplane.receive() == []


async def test_descriptors_that_were_never_taken_are_closed(ends, nursery):
    control, dataplane = ends
    nursery.start_soon(control.run_writer)
    read, write = os.pipe()
    control.send(ListenCommand(1), [write])
    await heard(dataplane, 1)
    os.close(write)
    dataplane.close()
    await trio.testing.wait_all_tasks_blocked()
    os.set_blocking(read, False)
    assert os.read(read, 1) == b""  # or it would block
    os.close(read)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_frames_may_arrive_in_any_chunks(size):
    messages = [AckEvent(count, count) for count in range(50)]
    stream = b"".join(map(encode_frame, messages))
    frames, got = MessageFrames(), []
    for at in range(0, len(stream), size):
        got += [
            msgspec.msgpack.decode(b, type=AckEvent) for b in frames.feed(stream[at : at + size])
        ]
    assert got == messages


async def test_a_message_whose_descriptors_can_not_all_be_duplicated_is_not_sent(ends):
    control, _ = ends
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="Bad file descriptor"):
        control.send(ListenCommand(2), [0, -1])
    assert (os.listdir("/proc/self/fd"), control.sent) == (before, 0)


async def test_descriptors_that_can_not_be_received_are_lost_for_their_message_alone(ends, nursery):
    control, dataplane = ends
    nursery.start_soon(control.run_writer)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    read, write = os.pipe()
    control.send(ListenCommand(2), [read, read])
    await trio.testing.wait_all_tasks_blocked()
    spare = os.dup(read)
    os.close(spare)
    resource.setrlimit(resource.RLIMIT_NOFILE, (spare + 1, limits[1]))  # room for one
    try:
        assert await heard(dataplane, 1) == [ListenCommand(2)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert os.dup(read) == spare  # which was given back
    control.send(ListenCommand(1), [write])
    assert await heard(dataplane, 1) == [ListenCommand(1)]
    with pytest.raises(OSError, match="Too many open files"):
        dataplane.take_descriptors()
    (came,) = dataplane.take_descriptors()
    assert os.fstat(came).st_ino == os.fstat(write).st_ino
    for number in (read, write, spare, came):
        os.close(number)
