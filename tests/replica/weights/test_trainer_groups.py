"""A group that is destroyed while its ranks still join, before the receiver has it."""

import pytest

from omni_proxy.process_group.rendezvous import Rendezvous
from omni_proxy.process_group.tensor_plan import GroupError
from omni_proxy.replica.weights.trainer_groups import DEFAULT_RECEIVE_SETTINGS, TrainerGroups


class Slow:
    """A receiver that does not have the group yet when it is destroyed."""

    def init(self, rendezvous, stop):
        ended = []
        stop.on_cancel(ended.append)
        raise GroupError(*ended)  # nothing else ends it before its deadline

    def destroy(self, name):
        raise GroupError("The group to be destroyed does not exist.")


def test_a_caller_that_is_ended_before_it_began_to_join_does_not_wait_for_its_deadline():
    sync = TrainerGroups("stage", target=None, terms=DEFAULT_RECEIVE_SETTINGS)
    sync._receiver = Slow()
    joining = sync.join(Rendezvous("127.0.0.1", 1, 1, 2, "g", "gloo"))
    step = next(joining)
    leaving = sync.leave("g")
    next(leaving).call()
    with pytest.raises(StopIteration):
        leaving.send(None)
    with pytest.raises(GroupError, match="'g' was destroyed") as ended:
        step.call()
    with pytest.raises(GroupError, match="'g' was destroyed"):
        joining.throw(ended.value)
    assert sync._joining == {}
