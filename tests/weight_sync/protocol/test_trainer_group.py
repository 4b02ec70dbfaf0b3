"""The sync state machine with simulated participants that join, refuse, fail, crash or send false reports."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from omni_proxy.admin_ops.results import WorkerResult
from omni_proxy.weight_sync.protocol.requests import RankRange, UpdateFlags
from omni_proxy.weight_sync.protocol.trainer_group import (
    TRANSITIONS,
    GroupOwner,
    InvalidTransition,
    ParticipantStatus,
    SyncEvent,
    SyncState,
    WeightSync,
    next_state,
)
from tests.example_counts import examples

NAMES = ("http://a", "http://b", "http://c")
LAST, MORE = UpdateFlags(flush_cache=True), UpdateFlags(flush_cache=False)
# What a participant does: succeed, refuse, fail halfway, die, or report success with other weights.
SUCCEEDS, REFUSES, BREAKS, DIES, LIES = "succeeds", "refuses", "breaks", "dies", "lies"
BEFORE_APPLY = st.sampled_from((SUCCEEDS, SUCCEEDS, SUCCEEDS, REFUSES, DIES))
DURING_APPLY = st.sampled_from(
    (SUCCEEDS, SUCCEEDS, SUCCEEDS, SUCCEEDS, REFUSES, BREAKS, DIES, LIES)
)


def behaviours_of(participant_behaviours):
    """In most examples all participants succeed, so that rounds are published."""
    all_succeed = st.just(dict.fromkeys(NAMES, SUCCEEDS))
    return (
        all_succeed
        | all_succeed
        | st.fixed_dictionaries(dict.fromkeys(NAMES, participant_behaviours))
    )


def ok(name):
    return WorkerResult(name, 200, {"success": True})


def no(name):
    return WorkerResult(name, 400, {"success": False, "message": "no"})


def lost(name):
    return WorkerResult(name, None, error="ReadError")


class SimulatedParticipant:
    """`weights` has everything that was applied, in order."""

    def __init__(self):
        self.alive, self.joined, self.armed = True, False, False
        self.weights = ()


class Fleet(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.sync = WeightSync()
        self.participants = {name: SimulatedParticipant() for name in NAMES}
        self.uncertain = set()
        self.published = {()}
        self.count = 0

    # Calls of the trainer

    @rule(behaviours=behaviours_of(BEFORE_APPLY))
    def init(self, behaviours):
        alive = [name for name in NAMES if self.participants[name].alive]
        if self.sync.state is not SyncState.IDLE:
            with pytest.raises(InvalidTransition) as refused:
                self.sync.begin(GroupOwner("h", "other:1", 0.0), ())
            assert refused.value.status == 409
            return
        if not alive:
            return
        layout = [RankRange(name, 1, 1 + at) for at, name in enumerate(alive)]
        self.sync.begin(GroupOwner("g", "host:1", 0.0), layout)

        def join(participant):
            participant.joined = True

        succeeded = self.call_participants(behaviours, join)
        assert (self.sync.finish_step() is SyncState.GROUPED) is succeeded
        self.follow_up(succeeded)

    @precondition(lambda self: self.sync.state is SyncState.GROUPED)
    @rule(behaviours=behaviours_of(BEFORE_APPLY), batched=st.booleans())
    def prepare(self, behaviours, batched):
        if batched and self.sync.has_unpublished:
            with pytest.raises(InvalidTransition):
                self.sync.arm(batched=True, buckets=2, names=("t",))
            assert self.sync.state is SyncState.GROUPED
            return
        self.sync.arm(batched=batched, buckets=1, names=("t",))

        def arm(participant):
            participant.armed = True

        succeeded = self.call_participants(behaviours, arm)
        assert (self.sync.finish_step() is SyncState.ARMED) is succeeded
        self.follow_up(succeeded)

    @precondition(lambda self: self.sync.state is SyncState.ARMED)
    @rule(behaviours=behaviours_of(DURING_APPLY), marks=st.sampled_from((LAST, MORE)))
    def complete(self, behaviours, marks):
        self.sync.commit(marks)
        self.apply(behaviours)

    @precondition(lambda self: self.sync.state is SyncState.GROUPED)
    @rule(behaviours=behaviours_of(DURING_APPLY), marks=st.sampled_from((LAST, MORE)))
    def update(self, behaviours, marks):
        self.sync.update(marks, ("t",))
        self.apply(behaviours)

    @precondition(lambda self: self.sync.state is SyncState.GROUPED and self.sync.has_unpublished)
    @rule()
    def continue_generation(self):
        if self.sync.round.is_complete:
            self.sync.close()
            self.verify()
        else:
            self.uncertain |= self.sync.abandon().keys()
        self.follow_up()

    @rule()
    def destroy(self):
        if self.sync.state is SyncState.IDLE:
            with pytest.raises(InvalidTransition) as refused:
                self.sync.leave()
            assert refused.value.status == 400
            return
        if self.sync.state is SyncState.GROUPED and self.sync.has_unpublished:
            self.sync.close()
            self.verify()
        if self.sync.state is not SyncState.ABORTING:
            self.sync.leave()
        self.follow_up()

    # Failures

    @precondition(lambda self: self.sync.state is not SyncState.IDLE)
    @rule()
    def the_trainer_dies(self):
        self.sync.fail("the trainer is gone")
        self.follow_up()
        assert self.sync.cause == "the trainer is gone"

    @precondition(lambda self: self.sync.state is not SyncState.IDLE)
    @rule(name=st.sampled_from(NAMES))
    def a_participant_dies(self, name):
        if name in self.sync.participant_states:
            self.participants[name].alive = False
            self.sync.fail(f"{name} is lost", name)
            self.follow_up()
            assert name in self.sync.cause

    @precondition(lambda self: self.sync.state is SyncState.IDLE)
    @rule(name=st.sampled_from(NAMES))
    def a_dead_participant_restarts(self, name):
        if not self.participants[name].alive:
            self.participants[name] = SimulatedParticipant()
            self.uncertain.discard(name)

    @precondition(lambda self: self.sync.state in (SyncState.IDLE, SyncState.GROUPED))
    @rule(event=st.sampled_from((SyncEvent.COMPLETE, SyncEvent.PREPARE, SyncEvent.UPDATE)))
    def call_in_the_wrong_state(self, event):
        if (self.sync.state, event) in TRANSITIONS:
            return
        before = self.sync.state
        with pytest.raises(InvalidTransition) as refused:
            self.sync.check(event)
        assert (refused.value.status, self.sync.state) == (400, before)

    # Consequences

    def call_participants(self, behaviours, on_success):
        """Return whether every participant succeeded."""
        for name in self.sync.participant_states:
            participant, behaviour = self.participants[name], behaviours[name]
            if behaviour == DIES:
                participant.alive = False
            if behaviour == SUCCEEDS:
                on_success(participant)
                self.sync.on_result(ok(name))
            else:
                self.sync.on_result(no(name) if behaviour == REFUSES else lost(name))
        return all(behaviours[name] == SUCCEEDS for name in self.sync.participant_states)

    def apply(self, behaviours):
        self.count += 1
        batched = self.sync.round.batched
        for name in self.sync.participant_states:
            participant, behaviour = self.participants[name], behaviours[name]
            if behaviour in (SUCCEEDS, LIES):
                applied = self.count if behaviour == SUCCEEDS else (name, self.count)
                participant.weights += (applied,)
                participant.armed = False
                self.sync.on_result(ok(name))
                continue
            if behaviour == DIES:
                participant.alive = False
            if behaviour == BREAKS or (behaviour == REFUSES and not batched):
                participant.weights += (("half", name, self.count),)
            result = no(name) if behaviour == REFUSES else lost(name)
            self.sync.on_result(result, modified=not (behaviour == REFUSES and batched))
        all_ok = all(behaviours[name] in (SUCCEEDS, LIES) for name in self.sync.participant_states)
        assert self.sync.all_ok is all_ok
        self.sync.finish_step()
        if self.sync.state is SyncState.VERIFYING:
            self.verify()
        self.follow_up(all_ok)

    def verify(self):
        """The largest group with equal weights is proven; if two differ, both are uncertain."""
        survivors = [name for name, part in self.sync.participant_states.items() if not part.failed]
        groups = Counter(self.participants[name].weights for name in survivors)
        largest = groups.most_common(1)[0]
        is_unique = sum(1 for count in groups.values() if count == largest[1]) == 1
        agreed = [n for n in survivors if is_unique and self.participants[n].weights == largest[0]]
        newly_uncertain = self.sync.publish(agreed)
        assert newly_uncertain.keys() == self.sync.participant_states.keys() - set(agreed)
        self.uncertain = (self.uncertain - set(agreed)) | newly_uncertain.keys()
        for name in agreed:
            self.published.add(self.participants[name].weights)

    def follow_up(self, succeeded=True):
        if not succeeded:
            assert self.sync.state in (SyncState.ABORTING, SyncState.IDLE)
        if self.sync.state is not SyncState.ABORTING:
            return
        for name in self.sync.participant_states:
            participant = self.participants[name]
            if participant.alive:
                participant.armed = participant.joined = False
            self.sync.on_left(name, ok=participant.alive)
        self.uncertain |= self.sync.end().keys()

    def routed(self):
        """Participants that get requests: alive, not uncertain, not in a round."""
        touched = {name for name, part in self.sync.participant_states.items() if part.modified}
        return [
            name
            for name in NAMES
            if self.participants[name].alive and name not in self.uncertain | touched
        ]

    @invariant()
    def no_participant_is_armed_outside_a_round(self):
        if self.sync.state in (SyncState.IDLE, SyncState.GROUPED):
            assert not [
                n for n in NAMES if self.participants[n].alive and self.participants[n].armed
            ]
        if self.sync.state is SyncState.IDLE:
            assert not [
                n for n in NAMES if self.participants[n].alive and self.participants[n].joined
            ]

    @invariant()
    def nothing_unpublished_is_routed(self):
        for name in self.routed():
            assert self.participants[name].weights in self.published

    @invariant()
    def all_participants_of_a_group_have_joined_it(self):
        if self.sync.state in (SyncState.GROUPED, SyncState.ARMED):
            assert all(self.participants[name].joined for name in self.sync.participant_states)
        if self.sync.state is SyncState.ARMED:
            assert all(self.participants[name].armed for name in self.sync.participant_states)


Fleet.TestCase.settings = settings(max_examples=examples(150), stateful_step_count=20)
TestFleet = Fleet.TestCase


def grouped(*names):
    sync = WeightSync()
    sync.begin(
        GroupOwner("g", "host:1", 5.0, "me"),
        [RankRange(n, 1, 1 + at) for at, n in enumerate(names)],
    )
    for name in names:
        sync.on_result(ok(name))
    assert sync.finish_step() is SyncState.GROUPED
    return sync


def test_the_owner_is_described_with_age_and_step():
    sync = grouped("http://a")
    description = sync.owner.describe(8.5, sync.state)
    assert description == "group 'g' at host:1 of me, begun 3.5 s ago, step grouped"


def test_calls_after_the_end_of_a_sync_are_refused_with_its_cause():
    sync = grouped("http://a")
    sync.fail("http://a is lost: nothing listens", "http://a")
    sync.on_left("http://a", ok=False)
    assert sync.end() == {}
    with pytest.raises(InvalidTransition, match="http://a is lost"):
        sync.arm(batched=False, buckets=1, names=("t",))


def test_a_sync_that_all_participants_refuse_leaves_no_participant_uncertain():
    sync = grouped("http://a", "http://b")
    sync.arm(batched=True, buckets=1, names=("t",))
    for name in sync.participant_states:
        sync.on_result(ok(name))
    sync.finish_step()
    sync.commit(LAST)
    for name in sync.participant_states:
        sync.on_result(no(name), modified=False)
    assert sync.finish_step() is SyncState.ABORTING
    for name in sync.participant_states:
        sync.on_left(name, ok=True)
    assert sync.end() == {}


def test_a_sync_that_succeeds_on_one_participant_is_published_for_that_participant():
    sync = grouped("http://a", "http://b")
    sync.arm(batched=True, buckets=1, names=("t",))
    for name in sync.participant_states:
        sync.on_result(ok(name))
    sync.finish_step()
    sync.commit(LAST)
    sync.on_result(ok("http://a"))
    sync.on_result(lost("http://b"))
    assert sync.finish_step() is SyncState.VERIFYING
    assert sync.publish(["http://a"]) == {"http://b": "ReadError"}
    assert sync.state is SyncState.ABORTING
    assert sync.participant_statuses() == {"http://a": "ok", "http://b": "uncertain"}


def test_calls_that_all_abort_requests_complete_the_round():
    sync = grouped("http://a")
    for _ in range(2):
        sync.update(UpdateFlags(abort_all_requests=True), ("t",))
        sync.on_result(ok("http://a"))
        assert sync.finish_step() is SyncState.GROUPED
    assert sync.round.is_complete
    sync.update(MORE, ("t",))
    sync.on_result(ok("http://a"))
    sync.finish_step()
    assert not sync.round.is_complete


def test_only_an_open_round_can_be_ended():
    with pytest.raises(InvalidTransition, match="no weight-update session is open"):
        grouped("http://a").commit_end()


def test_a_participant_is_updating_while_it_applies():
    sync = grouped("http://a")
    sync.update(LAST, ("t",))
    assert sync.participant_statuses() == {"http://a": ParticipantStatus.UPDATING.value}


def test_every_active_state_can_fail_and_be_destroyed():
    for state in SyncState:
        if state in (SyncState.IDLE, SyncState.ABORTING):
            continue
        assert next_state(state, SyncEvent.FAILED) is SyncState.ABORTING
        assert next_state(state, SyncEvent.DESTROY) is SyncState.ABORTING
