"""Which prefix trees each process of the new program gets, and which are left out."""

from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import trio

from omni_proxy.multiprocess.ipc.messages import LoadTreesCommand
from omni_proxy.upgrade import tree_handover
from omni_proxy.upgrade.tree_handover import load_all, save_all


class Handle:
    """A process that acknowledges at once, or, if `stuck`, never."""

    ready = True

    def __init__(self, index, *, stuck=False, content=b"trees"):
        self.index, self.stuck, self.content = index, stuck, content
        self.sent, self.acked = [], 0

    def send_files(self, command, descriptor):
        self.sent.append(descriptor)
        if not isinstance(command, LoadTreesCommand):
            with open(descriptor, "wb", closefd=False) as file:
                file.write(self.content)
        self.acked += not self.stuck
        return 1

    async def wait_acknowledged(self, number):
        while self.acked < number:
            await trio.sleep_forever()


def parts_of(*handles):
    async def await_replicated():
        return

    slots = {each.index: SimpleNamespace(index=each.index, handle=each) for each in handles}
    manager = SimpleNamespace(handles=handles, slots=slots, await_replicated=await_replicated)
    return SimpleNamespace(process_manager=manager)


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ((1, 2), (1, 2), [11, 12]),
        ((1, 2), (1, 2, 3), [11, 12, 11]),
        ((1, 3), (1, 2), [11, 13]),
        ((0,), (1, 2), [10, 10]),
    ],
)
async def test_a_process_gets_the_trees_of_its_index_or_of_another(before, after, expected):
    handles = [Handle(index) for index in after]
    await load_all(parts_of(*handles), {index: index + 10 for index in before})
    assert [handle.sent for handle in handles] == [[descriptor] for descriptor in expected]


async def test_a_process_that_is_late_or_has_no_trees_is_left_out(autojump_clock):
    handles = Handle(1), Handle(2, stuck=True), Handle(3, content=b"")
    with ExitStack() as stack:
        files = await save_all(parts_of(*handles), stack)
        assert files == {1: handles[0].sent[0]}


async def test_an_upgrade_continues_without_free_descriptors(monkeypatch):
    def no_file():
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(tree_handover, "tree_file", no_file)
    with ExitStack() as stack:
        assert await save_all(parts_of(Handle(1)), stack) == {}
        assert await save_all(parts_of(), stack) == {}
