import os
import resource
import socket

import msgspec
import pytest
import trio
import trio.testing

from omni_proxy.multiprocess.ipc.channel import IpcChannel, MessageFrames, encode_frame
from omni_proxy.multiprocess.ipc.messages import (
    AckEvent,
    ClearCacheCommand,
    ListenCommand,
    ProcessCommand,
    ProcessEvent,
)


@pytest.fixture
async def channels():
    """The channel of the main process, and that of a data-plane process."""
    main_socket, process_socket = socket.socketpair()
    control = IpcChannel(main_socket, msgspec.msgpack.Decoder(ProcessEvent))
    dataplane = IpcChannel(process_socket, msgspec.msgpack.Decoder(ProcessCommand))
    yield control, dataplane
    control.close()
    dataplane.close()


async def receive(channel, count):
    messages = []
    with trio.fail_after(30):
        while len(messages) < count:
            messages += await channel.receive()
    return messages


async def test_messages_arrive_in_order_with_their_descriptors(channels, nursery, tmp_path):
    control, dataplane = channels
    nursery.start_soon(control.run_writer)
    for number in range(3):
        with (tmp_path / str(number)).open("w+b") as file:
            file.write(b"%d" % number)
            file.flush()
            assert control.send(ClearCacheCommand(number)) == 2 * number + 1
            control.send(ListenCommand(1), [file.fileno()])  # closed here before it was sent
    messages = await receive(dataplane, 6)
    assert messages == [
        message for number in range(3) for message in (ClearCacheCommand(number), ListenCommand(1))
    ]
    for number in range(3):
        (descriptor,) = dataplane.take_descriptors()
        with os.fdopen(descriptor, "rb") as file:
            file.seek(0)
            assert file.read() == b"%d" % number


async def test_messages_sent_before_the_close_are_received(channels, nursery):
    control, dataplane = channels
    nursery.start_soon(dataplane.run_writer)
    for count in range(20_000):
        dataplane.send(AckEvent(count, 0))
    assert dataplane.waiting_bytes > 100_000
    nursery.start_soon(flush_and_shut, dataplane)
    assert [ack.count for ack in await receive(control, 20_000)] == list(range(20_000))
    assert await control.receive() == []
    assert dataplane.waiting_bytes == 0


async def flush_and_shut(channel):
    await channel.wait_flushed()
    channel.shut()


async def test_a_connection_reset_ends_the_stream_of_messages(channels):
    control, dataplane = channels
    control.close()
    assert await dataplane.receive() == []


async def test_descriptors_that_were_never_taken_are_closed(channels, nursery):
    control, dataplane = channels
    nursery.start_soon(control.run_writer)
    read, write = os.pipe()
    control.send(ListenCommand(1), [write])
    await receive(dataplane, 1)
    os.close(write)
    dataplane.close()
    await trio.testing.wait_all_tasks_blocked()
    os.set_blocking(read, False)
    assert os.read(read, 1) == b""  # the write end is closed; else this would block
    os.close(read)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_frames_can_arrive_in_any_chunks(size):
    messages = [AckEvent(count, count) for count in range(50)]
    stream = b"".join(map(encode_frame, messages))
    frames, received = MessageFrames(), []
    for at in range(0, len(stream), size):
        received += [
            msgspec.msgpack.decode(b, type=AckEvent) for b in frames.feed(stream[at : at + size])
        ]
    assert received == messages


async def test_a_message_is_not_sent_unless_all_its_descriptors_can_be_duplicated(channels):
    control, _ = channels
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="Bad file descriptor"):
        control.send(ListenCommand(2), [0, -1])
    assert (os.listdir("/proc/self/fd"), control.sent) == (before, 0)


async def test_descriptors_that_cannot_be_received_are_lost_for_one_message_only(channels, nursery):
    control, dataplane = channels
    nursery.start_soon(control.run_writer)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    read, write = os.pipe()
    control.send(ListenCommand(2), [read, read])
    await trio.testing.wait_all_tasks_blocked()
    spare = os.dup(read)
    os.close(spare)
    resource.setrlimit(resource.RLIMIT_NOFILE, (spare + 1, limits[1]))  # room for one descriptor
    try:
        assert await receive(dataplane, 1) == [ListenCommand(2)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert os.dup(read) == spare  # which was closed again
    control.send(ListenCommand(1), [write])
    assert await receive(dataplane, 1) == [ListenCommand(1)]
    with pytest.raises(OSError, match="Too many open files"):
        dataplane.take_descriptors()
    (received,) = dataplane.take_descriptors()
    assert os.fstat(received).st_ino == os.fstat(write).st_ino
    for number in (read, write, spare, received):
        os.close(number)
