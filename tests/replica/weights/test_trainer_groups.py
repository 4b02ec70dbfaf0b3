"""A group is destroyed while its ranks are joining, before the receiver has it."""

import pytest

from omni_proxy.process_group.rendezvous import Rendezvous
from omni_proxy.process_group.tensor_plan import GroupError
from omni_proxy.replica.weights.trainer_groups import DEFAULT_RECEIVE_SETTINGS, TrainerGroups


class SlowReceiver:
    """A receiver that does not have the group yet when it is destroyed."""

    def init(self, rendezvous, stop):
        reasons = []
        stop.on_cancel(reasons.append)
        raise GroupError(*reasons)  # without a cancellation it would wait for its deadline

    def destroy(self, name):
        raise GroupError("The group to be destroyed does not exist.")


def test_a_join_that_is_cancelled_before_it_starts_ends_at_once():
    groups = TrainerGroups("stage", target=None, terms=DEFAULT_RECEIVE_SETTINGS)
    groups._receiver = SlowReceiver()
    joining = groups.join(Rendezvous("127.0.0.1", 1, 1, 2, "g", "gloo"))
    step = next(joining)
    leaving = groups.leave("g")
    next(leaving).call()
    with pytest.raises(StopIteration):
        leaving.send(None)
    with pytest.raises(GroupError, match="'g' was destroyed") as caught:
        step.call()
    with pytest.raises(GroupError, match="'g' was destroyed"):
        joining.throw(caught.value)
    assert groups._joining == {}
