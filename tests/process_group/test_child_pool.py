import pytest

from omni_proxy.process_group.child_pool import Children
from omni_proxy.process_group.tensor_plan import GroupError


class FakeChild:
    def __init__(self, pid):
        self.pid = pid
        self.why = None
        self.told = []

    def tell(self, order):
        self.told.append(order.blocks)

    def kill(self, why):
        self.why = self.why or why

    def reaped(self, within_secs):
        return self.why is not None


class FakeNest:
    def __init__(self):
        self.did = []

    def hold(self):
        self.did.append("held")

    def warm(self):
        self.did.append("warm")

    def release(self):
        self.did.append("released")

    def pid(self):
        return 1


@pytest.fixture
def nest():
    return FakeNest()


@pytest.fixture
def children(nest):
    numbers = iter((10, None, 12))
    return Children(nest, lambda _: FakeChild(next(numbers)))


def test_only_those_that_live_are_counted_and_told(children):
    first, unborn, third = (children.take() for _ in range(3))
    assert children.pids() == [1, 10, 12]
    first.kill("gone")
    assert children.living() == [unborn, third]
    children.forget((4, 5))
    assert [each.told for each in (first, unborn, third)] == [[], [(4, 5)], [(4, 5)]]


def test_a_close_ends_all_and_lets_go_of_the_nest_once(children, nest):
    taken = children.take()
    children.warm()
    children.close()
    children.close()
    children.warm()
    assert taken.why == "the receiver was closed"
    assert nest.did == ["held", "warm", "released"]
    with pytest.raises(GroupError, match="shutting down"):
        children.take()
