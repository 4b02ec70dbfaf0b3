"""The session against simulated members that join, refuse, fail, die and lie."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from omni_proxy.admin_ops.results import WorkerResult
from omni_proxy.weight_sync.protocol.requests import RankRange, UpdateFlags
from omni_proxy.weight_sync.protocol.session import (
    TRANSITIONS,
    GroupOwner,
    InvalidTransition,
    MemberStatus,
    SyncEvent,
    SyncSession,
    SyncState,
    next_state,
)
from tests.example_counts import examples

NAMES = ("http://a", "http://b", "http://c")
LAST, MORE = UpdateFlags(flush_cache=True), UpdateFlags(flush_cache=False)
# A member's behaviour: succeed, refuse, fail halfway, die, or report success
# with other weights.
WELL, NO, BROKEN, DIES, LIES = "well", "no", "broken", "dies", "lies"
PLAIN = st.sampled_from((WELL, WELL, WELL, NO, DIES))
WORSE = st.sampled_from((WELL, WELL, WELL, WELL, NO, BROKEN, DIES, LIES))


def fleet_of(deeds):
    """Mostly all members succeed, so that rounds get published."""
    all_well = st.just(dict.fromkeys(NAMES, WELL))
    return all_well | all_well | st.fixed_dictionaries(dict.fromkeys(NAMES, deeds))


def ok(name):
    return WorkerResult(name, 200, {"success": True})


def no(name):
    return WorkerResult(name, 400, {"success": False, "message": "no"})


def lost(name):
    return WorkerResult(name, None, error="ReadError")


class Naive:
    """`weights`: everything that was ever applied, in order."""

    def __init__(self):
        self.alive, self.joined, self.armed = True, False, False
        self.weights = ()


class Fleet(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.session = SyncSession()
        self.members = {name: Naive() for name in NAMES}
        self.doubted = set()
        self.published = {()}
        self.count = 0

    # Calls of the trainer

    @rule(deeds=fleet_of(PLAIN))
    def init(self, deeds):
        there = [name for name in NAMES if self.members[name].alive]
        if self.session.state is not SyncState.IDLE:
            with pytest.raises(InvalidTransition) as refused:
                self.session.begin(GroupOwner("h", "other:1", 0.0), ())
            assert refused.value.status == 409
            return
        if not there:
            return
        seats = [RankRange(name, 1, 1 + at) for at, name in enumerate(there)]
        self.session.begin(GroupOwner("g", "host:1", 0.0), seats)

        def join(member):
            member.joined = True

        went = self.ask(deeds, join)
        assert (self.session.finish_step() is SyncState.GROUPED) is went
        self.follow_up(went)

    @precondition(lambda self: self.session.state is SyncState.GROUPED)
    @rule(deeds=fleet_of(PLAIN), batched=st.booleans())
    def prepare(self, deeds, batched):
        if batched and self.session.has_unpublished:
            with pytest.raises(InvalidTransition):
                self.session.arm(batched=True, buckets=2, names=("t",))
            assert self.session.state is SyncState.GROUPED
            return
        self.session.arm(batched=batched, buckets=1, names=("t",))

        def arm(member):
            member.armed = True

        went = self.ask(deeds, arm)
        assert (self.session.finish_step() is SyncState.ARMED) is went
        self.follow_up(went)

    @precondition(lambda self: self.session.state is SyncState.ARMED)
    @rule(deeds=fleet_of(WORSE), marks=st.sampled_from((LAST, MORE)))
    def complete(self, deeds, marks):
        self.session.commit(marks)
        self.apply(deeds)

    @precondition(lambda self: self.session.state is SyncState.GROUPED)
    @rule(deeds=fleet_of(WORSE), marks=st.sampled_from((LAST, MORE)))
    def update(self, deeds, marks):
        self.session.update(marks, ("t",))
        self.apply(deeds)

    @precondition(
        lambda self: self.session.state is SyncState.GROUPED and self.session.has_unpublished
    )
    @rule()
    def goes_on(self):
        if self.session.round.is_complete:
            self.session.close()
            self.verify()
        else:
            self.doubted |= self.session.abandon().keys()
        self.follow_up()

    @rule()
    def destroy(self):
        if self.session.state is SyncState.IDLE:
            with pytest.raises(InvalidTransition) as refused:
                self.session.leave()
            assert refused.value.status == 400
            return
        if self.session.state is SyncState.GROUPED and self.session.has_unpublished:
            self.session.close()
            self.verify()
        if self.session.state is not SyncState.ABORTING:
            self.session.leave()
        self.follow_up()

    # Failures

    @precondition(lambda self: self.session.state is not SyncState.IDLE)
    @rule()
    def the_trainer_dies(self):
        self.session.fail("the trainer is gone")
        self.follow_up()
        assert self.session.cause == "the trainer is gone"

    @precondition(lambda self: self.session.state is not SyncState.IDLE)
    @rule(name=st.sampled_from(NAMES))
    def a_member_dies(self, name):
        if name in self.session.members:
            self.members[name].alive = False
            self.session.fail(f"{name} is lost", name)
            self.follow_up()
            assert name in self.session.cause

    @precondition(lambda self: self.session.state is SyncState.IDLE)
    @rule(name=st.sampled_from(NAMES))
    def a_dead_one_is_started_anew(self, name):
        if not self.members[name].alive:
            self.members[name] = Naive()
            self.doubted.discard(name)

    @precondition(lambda self: self.session.state in (SyncState.IDLE, SyncState.GROUPED))
    @rule(event=st.sampled_from((SyncEvent.COMPLETE, SyncEvent.PREPARE, SyncEvent.UPDATE)))
    def asked_out_of_place(self, event):
        if (self.session.state, event) in TRANSITIONS:
            return
        before = self.session.state
        with pytest.raises(InvalidTransition) as refused:
            self.session.check(event)
        assert (refused.value.status, self.session.state) == (400, before)

    # Consequences

    def ask(self, deeds, do):
        """Return whether every member succeeded."""
        for name in self.session.members:
            member, deed = self.members[name], deeds[name]
            if deed == DIES:
                member.alive = False
            if deed == WELL:
                do(member)
                self.session.on_result(ok(name))
            else:
                self.session.on_result(no(name) if deed == NO else lost(name))
        return all(deeds[name] == WELL for name in self.session.members)

    def apply(self, deeds):
        self.count += 1
        batched = self.session.round.batched
        for name in self.session.members:
            member, deed = self.members[name], deeds[name]
            if deed in (WELL, LIES):
                applied = self.count if deed == WELL else (name, self.count)
                member.weights += (applied,)
                member.armed = False
                self.session.on_result(ok(name))
                continue
            if deed == DIES:
                member.alive = False
            if deed == BROKEN or (deed == NO and not batched):
                member.weights += (("half", name, self.count),)
            answer = no(name) if deed == NO else lost(name)
            self.session.on_result(answer, modified=not (deed == NO and batched))
        did_it = all(deeds[name] in (WELL, LIES) for name in self.session.members)
        assert self.session.all_ok is did_it
        self.session.finish_step()
        if self.session.state is SyncState.VERIFYING:
            self.verify()
        self.follow_up(did_it)

    def verify(self):
        """The largest group agrees; of two that differ neither does."""
        survivors = [name for name, part in self.session.members.items() if not part.failed]
        held = Counter(self.members[name].weights for name in survivors)
        best = held.most_common(1)[0]
        alone = sum(1 for count in held.values() if count == best[1]) == 1
        agreed = [n for n in survivors if alone and self.members[n].weights == best[0]]
        doubted = self.session.publish(agreed)
        assert doubted.keys() == self.session.members.keys() - set(agreed)
        self.doubted = (self.doubted - set(agreed)) | doubted.keys()
        for name in agreed:
            self.published.add(self.members[name].weights)

    def follow_up(self, went=True):
        if not went:
            assert self.session.state in (SyncState.ABORTING, SyncState.IDLE)
        if self.session.state is not SyncState.ABORTING:
            return
        for name in self.session.members:
            member = self.members[name]
            if member.alive:
                member.armed = member.joined = False
            self.session.on_left(name, ok=member.alive)
        self.doubted |= self.session.end().keys()

    def routed(self):
        """Members that get requests: alive, not uncertain, not in a round."""
        touched = {name for name, part in self.session.members.items() if part.modified}
        return [
            name
            for name in NAMES
            if self.members[name].alive and name not in self.doubted | touched
        ]

    @invariant()
    def nobody_is_armed_when_nothing_is_under_way(self):
        if self.session.state in (SyncState.IDLE, SyncState.GROUPED):
            assert not [n for n in NAMES if self.members[n].alive and self.members[n].armed]
        if self.session.state is SyncState.IDLE:
            assert not [n for n in NAMES if self.members[n].alive and self.members[n].joined]

    @invariant()
    def nothing_unpublished_is_routed(self):
        for name in self.routed():
            assert self.members[name].weights in self.published

    @invariant()
    def everybody_in_a_group_has_joined_it(self):
        if self.session.state in (SyncState.GROUPED, SyncState.ARMED):
            assert all(self.members[name].joined for name in self.session.members)
        if self.session.state is SyncState.ARMED:
            assert all(self.members[name].armed for name in self.session.members)


Fleet.TestCase.settings = settings(max_examples=examples(150), stateful_step_count=20)
TestFleet = Fleet.TestCase


def grouped(*names):
    session = SyncSession()
    session.begin(
        GroupOwner("g", "host:1", 5.0, "me"),
        [RankRange(n, 1, 1 + at) for at, n in enumerate(names)],
    )
    for name in names:
        session.on_result(ok(name))
    assert session.finish_step() is SyncState.GROUPED
    return session


def test_the_owner_is_described_with_age_and_step():
    session = grouped("http://a")
    words = session.owner.describe(8.5, session.state)
    assert words == "group 'g' at host:1 of me, begun 3.5 s ago, step grouped"


def test_calls_after_the_end_are_refused_with_its_cause():
    session = grouped("http://a")
    session.fail("http://a is lost: nothing listens", "http://a")
    session.on_left("http://a", ok=False)
    assert session.end() == {}
    with pytest.raises(InvalidTransition, match="http://a is lost"):
        session.arm(batched=False, buckets=1, names=("t",))


def test_a_whole_sync_that_all_refuse_leaves_no_member_uncertain():
    session = grouped("http://a", "http://b")
    session.arm(batched=True, buckets=1, names=("t",))
    for name in session.members:
        session.on_result(ok(name))
    session.finish_step()
    session.commit(LAST)
    for name in session.members:
        session.on_result(no(name), modified=False)
    assert session.finish_step() is SyncState.ABORTING
    for name in session.members:
        session.on_left(name, ok=True)
    assert session.end() == {}


def test_a_whole_sync_that_one_member_took_is_published_for_that_member():
    session = grouped("http://a", "http://b")
    session.arm(batched=True, buckets=1, names=("t",))
    for name in session.members:
        session.on_result(ok(name))
    session.finish_step()
    session.commit(LAST)
    session.on_result(ok("http://a"))
    session.on_result(lost("http://b"))
    assert session.finish_step() is SyncState.VERIFYING
    assert session.publish(["http://a"]) == {"http://b": "ReadError"}
    assert session.state is SyncState.ABORTING
    assert session.member_statuses() == {"http://a": "ok", "http://b": "uncertain"}


def test_calls_that_all_abort_requests_complete_the_round():
    session = grouped("http://a")
    for _ in range(2):
        session.update(UpdateFlags(abort_all_requests=True), ("t",))
        session.on_result(ok("http://a"))
        assert session.finish_step() is SyncState.GROUPED
    assert session.round.is_complete
    session.update(MORE, ("t",))
    session.on_result(ok("http://a"))
    session.finish_step()
    assert not session.round.is_complete


def test_only_an_open_round_can_be_ended():
    with pytest.raises(InvalidTransition, match="no weights-update session"):
        grouped("http://a").commit_end()


def test_a_member_is_updating_while_it_applies():
    session = grouped("http://a")
    session.update(LAST, ("t",))
    assert session.member_statuses() == {"http://a": MemberStatus.UPDATING.value}


def test_every_state_but_idle_can_be_ended():
    for state in SyncState:
        if state in (SyncState.IDLE, SyncState.ABORTING):
            continue
        assert next_state(state, SyncEvent.FAILED) is SyncState.ABORTING
        assert next_state(state, SyncEvent.DESTROY) is SyncState.ABORTING
