"""The state machine of receiving, compared with a simple model of it."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from omni_proxy.replica.weights.receive_state import (
    LIVE,
    TABLE,
    CallOutOfOrder,
    GroupMembership,
    ReceiveEvent,
    ReceivePhase,
    ReceiveState,
)

NAMES = st.sampled_from(["g", "h"])
EVENTS = st.sampled_from(
    [
        ReceiveEvent.ARMED,
        ReceiveEvent.REFUSED,
        ReceiveEvent.RECEIVED,
        ReceiveEvent.LOST,
        ReceiveEvent.APPLY,
        ReceiveEvent.SETTLED,
    ]
)


def test_every_state_can_be_reached_and_left():
    assert set(TABLE) == set(ReceivePhase)
    assert all(TABLE.values())
    reached = {after for row in TABLE.values() for after in row.values()}
    assert reached == set(ReceivePhase) - {ReceivePhase.IDLE}


def test_a_live_transfer_can_be_ended_unless_it_is_being_applied():
    for state in LIVE:
        assert (ReceiveEvent.ENDED in TABLE[state]) is (state is not ReceivePhase.APPLYING)
        assert (ReceiveEvent.LOST in TABLE[state]) is (state is not ReceivePhase.APPLYING)


def test_a_group_that_failed_to_join_may_still_be_destroyed():
    """Another rank of the model may still have the group."""
    receive_state = ReceiveState()
    first, second = (GroupMembership("g", owner, 1, 2, "gloo") for owner in ("a:1", "b:1"))
    assert receive_state.begin_join(first) is False
    receive_state.complete_join(first)
    assert receive_state.begin_join(second) is True
    assert receive_state.abort_join(second)
    assert receive_state.state is ReceivePhase.IDLE
    receive_state.require_group("g")
    receive_state.leave("g")
    with pytest.raises(CallOutOfOrder, match="does not exist"):
        receive_state.require_group("g")


class ReceiveStateAgainstModel(RuleBasedStateMachine):
    """Models groups as a dictionary, and the only transfer as a name and a step."""

    joins, transfers = Bundle("joins"), Bundle("transfers")

    def __init__(self):
        super().__init__()
        self.receive_state = ReceiveState()
        self.groups = {}  # name -> "joining" | "joined"
        self.joins_open = {}
        self.live = None  # [name, step]
        self.failed = None  # the group whose transfer failed last, until a new transfer begins
        self.removed = set()  # groups that another rank may still have
        self.count = 0

    def end(self, name):
        if self.live is not None and self.live[0] == name and self.live[1] != "applying":
            self.live = None
        if self.failed == name:
            self.failed = None

    @rule(target=joins, name=NAMES)
    def join(self, name):
        self.count += 1
        group = GroupMembership(name, f"host:{self.count}", 1, 2, "gloo")
        if name in self.joins_open:
            with pytest.raises(CallOutOfOrder) as caught:
                self.receive_state.begin_join(group)
            assert caught.value.status == 409
            return None
        assert self.receive_state.begin_join(group) is (name in self.groups)
        self.joins_open[name] = group
        self.groups.setdefault(name, "joining")
        return group

    @rule(group=consumes(joins), outcome=st.sampled_from(["joined", "failed", "held"]))
    def joined(self, group, outcome):
        if group is None:
            return
        name = group.group_name
        is_current = self.joins_open.get(name) is group
        if outcome == "held":
            self.receive_state.keep_existing(group)
            if is_current:
                del self.joins_open[name]
                if self.groups.get(name) == "joining":
                    # Only an existing group can be in use.
                    self.receive_state.leave(name)
                    del self.groups[name]
                    self.removed.discard(name)
            return
        assert (
            self.receive_state.complete_join
            if outcome == "joined"
            else self.receive_state.abort_join
        )(group) is is_current
        if not is_current:
            return
        del self.joins_open[name]
        self.end(name)
        if outcome == "joined":
            self.groups[name] = "joined"
            self.removed.discard(name)
            if self.live is None:
                self.failed = None
        elif self.groups.pop(name, None) == "joined":
            self.removed.add(name)

    @rule(name=NAMES)
    def leave(self, name):
        if name in self.groups or name in self.removed:
            self.receive_state.require_group(name)
        else:
            with pytest.raises(CallOutOfOrder):
                self.receive_state.require_group(name)
        self.receive_state.leave(name)
        self.end(name)
        self.groups.pop(name, None)
        self.joins_open.pop(name, None)
        self.removed.discard(name)

    @rule(target=transfers, name=NAMES)
    def prepare(self, name):
        if self.live is not None:
            with pytest.raises(CallOutOfOrder) as caught:
                self.receive_state.prepare(name, 1, 0.0)
            assert caught.value.status == 409
            return None
        if self.groups.get(name) != "joined":
            with pytest.raises(CallOutOfOrder):
                self.receive_state.prepare(name, 1, 0.0)
            return None
        self.live, self.failed = [name, "arming"], None
        return self.receive_state.prepare(name, 1, 0.0)

    @rule(transfer=transfers, event=EVENTS)
    def report(self, transfer, event):
        if transfer is None:
            return
        current = transfer is self.receive_state.transfer
        step = self.live[1] if self.live is not None and current else None
        transitions = {
            ("arming", ReceiveEvent.ARMED): "receiving",
            ("arming", ReceiveEvent.REFUSED): None,
            ("arming", ReceiveEvent.LOST): "lost",
            ("receiving", ReceiveEvent.RECEIVED): "received",
            ("receiving", ReceiveEvent.LOST): "lost",
            ("received", ReceiveEvent.LOST): "lost",
            ("received", ReceiveEvent.APPLY): "applying",
            ("applying", ReceiveEvent.SETTLED): None,
        }
        is_valid = (step, event) in transitions
        assert self.receive_state.report(transfer, event, "it died") is is_valid
        if not is_valid:
            return
        step = transitions[step, event]
        name = self.live[0]
        self.live = [name, step] if step not in (None, "lost") else None
        if step == "lost":
            self.failed = name
            self.groups.pop(name, None)
            self.removed.add(name)

    @rule(name=NAMES)
    def complete(self, name):
        is_allowed = (
            self.live is not None
            and self.live[0] == name
            and self.live[1] != "arming"
            and not self.receive_state.transfer.completing
        )
        if is_allowed:
            assert self.receive_state.complete(name).completing
            return
        with pytest.raises(CallOutOfOrder) as caught:
            self.receive_state.complete(name)
        if self.live is None:
            assert caught.value.status == 400
        if self.failed == name:
            assert "it died" in str(caught.value)

    @invariant()
    def the_state_matches_the_model(self):
        if self.live is not None:
            expected = {ReceivePhase(self.live[1])}
        elif self.failed is not None:
            expected = {ReceivePhase.FAILED}
        elif "joined" in self.groups.values():
            expected = {ReceivePhase.GROUPED}
        else:
            expected = {ReceivePhase.IDLE}
        assert {self.receive_state.state} == expected
        assert {group.group_name for group in self.receive_state.groups} == set(self.groups)
        assert (self.receive_state.transfer is None) is (self.live is None and self.failed is None)
        assert self.receive_state.facts(1.0)["state"] == self.receive_state.state.value


TestReceiveStateAgainstModel = ReceiveStateAgainstModel.TestCase
