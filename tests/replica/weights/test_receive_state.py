"""The state machine against a naive model of a trainer, and its table against its documentation."""

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
REPORTS = st.sampled_from(
    [
        ReceiveEvent.ARMED,
        ReceiveEvent.REFUSED,
        ReceiveEvent.CAME,
        ReceiveEvent.LOST,
        ReceiveEvent.APPLIES,
        ReceiveEvent.SETTLED,
    ]
)


def test_every_state_can_be_left_and_reached():
    assert set(TABLE) == set(ReceivePhase)
    assert all(TABLE.values())
    reached = {after for row in TABLE.values() for after in row.values()}
    assert reached == set(ReceivePhase) - {ReceivePhase.IDLE}


def test_whatever_is_under_way_can_be_ended_but_not_what_is_applied():
    for state in LIVE:
        assert (ReceiveEvent.ENDED in TABLE[state]) is (state is not ReceivePhase.APPLYING)
        assert (ReceiveEvent.LOST in TABLE[state]) is (state is not ReceivePhase.APPLYING)


def test_a_group_that_was_not_replaced_may_still_be_destroyed():
    """At another rank of the model it may still be there."""
    receive_state = ReceiveState()
    first, second = (GroupMembership("g", owner, 1, 2, "gloo") for owner in ("a:1", "b:1"))
    assert receive_state.joining(first) is False
    receive_state.joined(first)
    assert receive_state.joining(second) is True
    assert receive_state.not_joined(second)
    assert receive_state.state is ReceivePhase.IDLE
    receive_state.require_group("g")
    receive_state.left("g")
    with pytest.raises(CallOutOfOrder, match="does not exist"):
        receive_state.require_group("g")


class Naive(RuleBasedStateMachine):
    """Groups as a dict, and the one transfer as a list of its events."""

    joins, transfers = Bundle("joins"), Bundle("transfers")

    def __init__(self):
        super().__init__()
        self.receive_state = ReceiveState()
        self.groups = {}  # name -> "joining" | "joined"
        self.joins_open = {}
        self.live = None  # [name, step]
        self.failed = None  # the group whose transfer failed last, until a new one begins
        self.gone = set()
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
            with pytest.raises(CallOutOfOrder) as refused:
                self.receive_state.joining(group)
            assert refused.value.status == 409
            return None
        assert self.receive_state.joining(group) is (name in self.groups)
        self.joins_open[name] = group
        self.groups.setdefault(name, "joining")
        return group

    @rule(group=consumes(joins), how=st.sampled_from(["joined", "failed", "held"]))
    def joined(self, group, how):
        if group is None:
            return
        name = group.group_name
        is_current = self.joins_open.get(name) is group
        if how == "held":
            self.receive_state.not_replaced(group)
            if is_current:
                del self.joins_open[name]
                if self.groups.get(name) == "joining":
                    # Only an existing group can be in use.
                    self.receive_state.left(name)
                    del self.groups[name]
            return
        assert (self.receive_state.joined if how == "joined" else self.receive_state.not_joined)(
            group
        ) is is_current
        if not is_current:
            return
        del self.joins_open[name]
        self.end(name)
        if how == "joined":
            self.groups[name] = "joined"
            self.gone.discard(name)
            if self.live is None:
                self.failed = None
        elif self.groups.pop(name, None) == "joined":
            self.gone.add(name)

    @rule(name=NAMES)
    def leave(self, name):
        if name in self.groups or name in self.gone:
            self.receive_state.require_group(name)
        else:
            with pytest.raises(CallOutOfOrder):
                self.receive_state.require_group(name)
        self.receive_state.left(name)
        self.end(name)
        self.groups.pop(name, None)
        self.joins_open.pop(name, None)
        self.gone.discard(name)

    @rule(target=transfers, name=NAMES)
    def prepare(self, name):
        if self.live is not None:
            with pytest.raises(CallOutOfOrder) as refused:
                self.receive_state.prepare(name, 1, 0.0)
            assert refused.value.status == 409
            return None
        if self.groups.get(name) != "joined":
            with pytest.raises(CallOutOfOrder):
                self.receive_state.prepare(name, 1, 0.0)
            return None
        self.live, self.failed = [name, "arming"], None
        return self.receive_state.prepare(name, 1, 0.0)

    @rule(transfer=transfers, event=REPORTS)
    def report(self, transfer, event):
        if transfer is None:
            return
        current = transfer is self.receive_state.transfer
        step = self.live[1] if self.live is not None and current else None
        after = {
            ("arming", ReceiveEvent.ARMED): "receiving",
            ("arming", ReceiveEvent.REFUSED): None,
            ("arming", ReceiveEvent.LOST): "lost",
            ("receiving", ReceiveEvent.CAME): "received",
            ("receiving", ReceiveEvent.LOST): "lost",
            ("received", ReceiveEvent.LOST): "lost",
            ("received", ReceiveEvent.APPLIES): "applying",
            ("applying", ReceiveEvent.SETTLED): None,
        }
        counts = (step, event) in after
        assert self.receive_state.report(transfer, event, "it died") is counts
        if not counts:
            return
        step = after[step, event]
        name = self.live[0]
        self.live = [name, step] if step not in (None, "lost") else None
        if step == "lost":
            self.failed = name
            self.groups.pop(name, None)
            self.gone.add(name)

    @rule(name=NAMES)
    def complete(self, name):
        fits = (
            self.live is not None
            and self.live[0] == name
            and self.live[1] != "arming"
            and not self.receive_state.transfer.completing
        )
        if fits:
            assert self.receive_state.complete(name).completing
            return
        with pytest.raises(CallOutOfOrder) as refused:
            self.receive_state.complete(name)
        if self.live is None:
            assert refused.value.status == 400
        if self.failed == name:
            assert "it died" in str(refused.value)

    @invariant()
    def says_what_is(self):
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


TestAgainstANaiveTrainer = Naive.TestCase
