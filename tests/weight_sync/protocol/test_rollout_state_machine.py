"""Compares the state machine of rollouts with a naive model of a fleet."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec.structs import replace

from omni_proxy.weight_sync.protocol import rollout_state_machine as transitions
from omni_proxy.weight_sync.protocol.rollout_state_machine import (
    Finish,
    FormerVersion,
    InvalidStep,
    NextBatch,
    Presence,
    RolloutPhase,
    RolloutState,
    RolloutWorker,
    Waiting,
    WorkerPhase,
)
from tests.example_counts import examples

OLD, NEW, UNKNOWN = "old", "new", "unknown"


def row(url, **fields):
    return RolloutWorker(url=url, served=True, former=FormerVersion(label=OLD), **fields)


def rollout(*urls, **fields):
    return RolloutState(id="0123456789", label=NEW, workers=tuple(map(row, urls)), **fields)


def serving(state):
    return {worker.url: Presence.SERVING for worker in state.workers}


def decision_of(state):
    """The decision while all workers are in rotation."""
    return transitions.decide(state, serving(state))


def updated(state, *urls, epoch=1):
    for url in urls:
        state = transitions.succeed(transitions.begin(state, [url]), url, epoch)
    return state


class Fleet(RuleBasedStateMachine):
    """The model is the weights of each worker, and the sets `down`, `gone` and `kept_out`."""

    @initialize(
        count=st.integers(1, 5),
        max_unavailable=st.integers(1, 3),
        canary=st.integers(0, 4),
        pauses=st.booleans(),
    )
    def start(self, count, max_unavailable, canary, pauses):
        urls = [f"w{at}" for at in range(count)]
        self.state = rollout(
            *urls,
            max_unavailable=max_unavailable,
            canary=min(canary, count),
            pause_after_canary=pauses and canary > 0,
        )
        self.weights = dict.fromkeys(urls, OLD)
        self.down, self.gone, self.kept_out = set(), set(), set()
        self.failed = self.cancelled = False
        self.touched = set()

    # The model

    def presence(self):
        presences = {}
        for url in self.weights:
            phase = self.state.worker(url).phase
            if url in self.gone:
                continue
            if url in self.down:
                presences[url] = Presence.DOWN
            elif phase is WorkerPhase.UPDATED and self.weights[url] != NEW:
                presences[url] = Presence.MISSED
            elif url in self.kept_out or self.weights[url] == UNKNOWN:
                presences[url] = Presence.OUT_OF_ROTATION
            else:
                presences[url] = Presence.SERVING
        return presences

    def out_of_rotation(self):
        """The workers of the fleet that get no requests."""
        away = self.down | self.kept_out
        away |= {url for url, weights in self.weights.items() if weights == UNKNOWN}
        away |= {url for url, presence in self.presence().items() if presence is Presence.MISSED}
        busy = self.state.urls(WorkerPhase.UPDATING, WorkerPhase.RESTORING)
        unrestored = self.state.urls(WorkerPhase.UNRESTORED, WorkerPhase.SKIPPED)
        return (away | set(busy)) - self.gone - set(unrestored)

    @property
    def stopped(self):
        return self.failed or self.cancelled

    # External events

    @rule(at=st.integers(0, 4), change=st.sampled_from(("down", "gone", "kept_out")))
    def lose_a_worker(self, at, change):
        url = f"w{at}"
        if url in self.weights and url not in self.state.urls(
            WorkerPhase.UPDATING, WorkerPhase.RESTORING
        ):
            getattr(self, change).add(url)

    @rule()
    def all_workers_return(self):
        self.down, self.kept_out = set(), set()

    @rule(at=st.integers(0, 4))
    def restart_of_a_worker(self, at):
        url = f"w{at}"
        if self.weights.get(url) == NEW and url in self.state.urls(WorkerPhase.UPDATED):
            self.weights[url] = "first"

    @rule(command=st.sampled_from(("pause", "resume", "resume", "cancel")))
    def steer(self, command):
        before = self.state
        try:
            if command == "cancel":
                self.state = transitions.cancel(self.state, "me")
                self.cancelled |= not self.failed
            else:
                self.state = getattr(transitions, command)(self.state)
        except InvalidStep:
            assert before.phase not in (RolloutPhase.RUNNING, RolloutPhase.PAUSED)
            assert self.state is before

    @rule()
    def restart_of_the_proxy(self):
        if self.state.ended:
            return
        for url in self.state.urls(WorkerPhase.UPDATING, WorkerPhase.RESTORING):
            self.weights[url] = UNKNOWN
        self.state = transitions.recover(self.state)

    # Decisions of the state machine

    @rule(
        outcomes=st.lists(
            st.sampled_from(("new", "new", "new", "refused", "uncertain")), min_size=5
        )
    )
    def next_batch(self, outcomes):
        self.state = transitions.observe(self.state, self.presence())
        decision = transitions.decide(self.state, self.presence())
        if isinstance(decision, NextBatch) and decision.restores:
            self.restore_batch(decision, outcomes)
        elif isinstance(decision, NextBatch):
            self.update_batch(decision, outcomes)
        elif isinstance(decision, Finish) and not self.state.ended:
            self.end(decision)
        elif isinstance(decision, Waiting):
            self.wait(decision)

    def update_batch(self, batch, outcomes):
        assert not self.stopped
        assert self.state.phase is RolloutPhase.RUNNING
        presences = self.presence()
        assert set(batch.urls) <= set(presences), "workers that are gone"
        assert not set(batch.urls) & self.down
        updated = {url for url, weights in self.weights.items() if weights == NEW}
        leaving = [url for url in batch.urls if presences[url] is Presence.SERVING]
        if len(self.state.urls(WorkerPhase.UPDATED)) < self.state.canary:
            assert len(updated - self.gone | set(batch.urls)) <= max(
                self.state.canary, len(updated) + 1
            )
        new_out = self.out_of_rotation() | set(batch.urls)
        if leaving:  # a serving worker leaves rotation only if the budget allows it
            served = {worker.url for worker in self.state.workers if worker.served}
            assert len(new_out & served) <= self.state.max_unavailable
        self.state = transitions.begin(self.state, batch.urls)
        self.touched |= set(batch.urls)
        for url, outcome in zip(batch.urls, outcomes, strict=False):
            before = self.weights[url]
            self.weights[url] = UNKNOWN
            if outcome == "new":
                self.weights[url] = NEW
                self.state = transitions.succeed(self.state, url, 7)
            elif outcome == "refused" and before == OLD:
                self.weights[url] = OLD
                self.failed = True
                self.state = transitions.refuse(self.state, url, "no")
            else:
                self.failed = True
                self.state = transitions.mark_uncertain(self.state, url, "it failed")
        assert not batch.urls[len(outcomes) :]

    def restore_batch(self, batch, outcomes):
        assert self.stopped
        self.state = transitions.begin_restore(self.state, batch.urls)
        for url, outcome in zip(batch.urls, outcomes, strict=False):
            if outcome == "new" and url not in self.down | self.gone:
                self.weights[url] = OLD
                self.state = transitions.restore(self.state, url)
            else:
                self.weights[url] = UNKNOWN
                self.state = transitions.fail_restore(self.state, url, "it does not answer")

    def end(self, decision):
        present = set(self.weights) - self.gone
        if decision.phase is RolloutPhase.SUCCEEDED:
            assert not self.stopped
            assert {self.weights[url] for url in present} <= {NEW}
        else:
            unrestored = set(self.state.urls(WorkerPhase.UNRESTORED, WorkerPhase.SKIPPED))
            assert {self.weights[url] for url in present - unrestored} <= {OLD}
            assert (decision.phase is RolloutPhase.CANCELLED) is (self.cancelled)
        self.state = transitions.finish(self.state, decision, "now")
        assert self.state.ended

    def wait(self, decision):
        """It waits only while it is paused, workers are out of rotation, or a batch runs."""
        assert decision.reason
        if self.state.busy:
            return
        paused = self.state.phase is RolloutPhase.PAUSED
        served = {worker.url for worker in self.state.workers if worker.served}
        assert (
            paused
            or len(self.out_of_rotation() & served) >= self.state.max_unavailable
            or self.down
        )

    # Invariants

    @invariant()
    def workers_that_were_never_chosen_keep_their_weights(self):
        if not hasattr(self, "state"):
            return
        for url in set(self.weights) - self.touched:
            assert self.weights[url] == OLD
            assert self.state.worker(url).phase in (WorkerPhase.PENDING, WorkerPhase.SKIPPED)

    @invariant()
    def no_worker_is_updated_after_a_failure(self):
        if hasattr(self, "state") and self.stopped:
            assert self.state.phase in (
                RolloutPhase.ROLLING_BACK, RolloutPhase.FAILED, RolloutPhase.CANCELLED
            )  # fmt: skip

    @precondition(lambda self: not self.state.ended)
    @rule()
    def it_ends_without_failures(self):
        """If all workers serve and every call succeeds, it ends after a limited number of steps."""
        saved = (self.state, dict(self.weights), set(self.touched), set(self.down))
        flags = (self.failed, self.cancelled, set(self.gone), set(self.kept_out))
        self.down, self.kept_out = set(), set()
        if self.state.busy:
            for url in self.state.urls(WorkerPhase.UPDATING, WorkerPhase.RESTORING):
                self.weights[url] = UNKNOWN
            self.state = transitions.recover(self.state)
        for _ in range(4 * len(self.weights) + 4):
            if self.state.ended:
                break
            if self.state.phase is RolloutPhase.PAUSED:
                self.state = transitions.resume(self.state)
            self.next_batch(["new"] * 5)
        assert self.state.ended, self.state
        self.state, self.weights, self.touched, self.down = saved
        self.failed, self.cancelled, self.gone, self.kept_out = flags


TestFleet = Fleet.TestCase
TestFleet.settings = settings(max_examples=examples(150), stateful_step_count=25)


def test_the_canary_is_the_first_batch_on_its_own():
    state = rollout("a", "b", "c", "d", max_unavailable=3, canary=1)
    assert decision_of(state) == NextBatch(("a",))
    assert decision_of(updated(state, "a")) == NextBatch(("b", "c", "d"))


def test_a_canary_of_two_is_two_batches_if_one_worker_may_be_unavailable():
    state = rollout("a", "b", "c", canary=2)
    assert decision_of(state) == NextBatch(("a",))
    assert decision_of(updated(state, "a")) == NextBatch(("b",))
    assert decision_of(updated(state, "a", "b")) == NextBatch(("c",))


def test_a_worker_out_of_rotation_for_another_reason_counts_in_the_budget():
    state = rollout("a", "b", "c")
    decision = transitions.decide(state, {**serving(state), "b": Presence.DOWN})
    assert decision == Waiting("waits for workers that are out of rotation: b")


def test_a_worker_that_never_served_does_not_count_in_the_budget():
    state = rollout("a", "b")
    state = replace(state, workers=(replace(state.workers[0], served=False), state.workers[1]))
    decision = transitions.decide(state, {"a": Presence.OUT_OF_ROTATION, "b": Presence.SERVING})
    assert decision == NextBatch(("b",))  # the canary must serve
    state = updated(state, "b")
    assert transitions.decide(
        state, {"a": Presence.OUT_OF_ROTATION, "b": Presence.SERVING}
    ) == NextBatch(("a",))


def test_a_rollout_pauses_after_the_canary_on_request():
    state = updated(rollout("a", "b", pause_after_canary=True), "a")
    assert state.phase is RolloutPhase.PAUSED
    assert isinstance(decision_of(state), Waiting)
    assert decision_of(transitions.resume(state)) == NextBatch(("b",))
    alone = updated(rollout("a", pause_after_canary=True), "a")
    assert decision_of(alone) == Finish(RolloutPhase.SUCCEEDED)


def test_after_a_refusal_only_updated_workers_are_restored():
    state = transitions.begin(updated(rollout("a", "b", "c"), "a"), ["b"])
    state = transitions.refuse(state, "b", "bad file")
    assert (state.phase, state.cause) == (RolloutPhase.ROLLING_BACK, "b: bad file")
    assert decision_of(state) == NextBatch(("a",), restores=True)
    state = transitions.restore(transitions.begin_restore(state, ["a"]), "a")
    end = decision_of(state)
    assert end == Finish(RolloutPhase.FAILED, "b: bad file")
    state = transitions.finish(state, end, "now")
    assert [worker.phase for worker in state.workers] == ["restored", "restored", "pending"]


def test_the_first_cause_is_kept():
    state = transitions.begin(rollout("a", "b", max_unavailable=2, canary=0), ["a", "b"])
    state = transitions.mark_uncertain(transitions.refuse(state, "b", "one"), "a", "two")
    assert state.cause == "b: one"
    assert transitions.cancel(state, "me").cause == "b: one"


def test_after_a_restart_of_the_proxy_the_interrupted_worker_is_updated_again():
    state = transitions.recover(transitions.begin(rollout("a", "b"), ["a"]))
    assert transitions.decide(
        state, {"a": Presence.OUT_OF_ROTATION, "b": Presence.SERVING}
    ) == NextBatch(("a",))
    assert isinstance(
        transitions.decide(state, {"a": Presence.DOWN, "b": Presence.SERVING}), Waiting
    )


def test_a_restart_during_a_rollback_continues_the_rollback():
    state = transitions.cancel(updated(rollout("a", "b"), "a"), "me")
    state = transitions.recover(transitions.begin_restore(state, ["a"]))
    decision = transitions.decide(state, {"a": Presence.UNKNOWN, "b": Presence.SERVING})
    assert decision == Waiting("waits for the first health checks of a")
    decision = transitions.decide(state, {"a": Presence.OUT_OF_ROTATION, "b": Presence.SERVING})
    assert decision == NextBatch(("a",), restores=True)


def test_a_worker_that_restarted_after_its_update_is_updated_again():
    state = updated(rollout("a", "b"), "a", "b")
    decision = transitions.decide(state, {"a": Presence.MISSED, "b": Presence.SERVING})
    assert decision == NextBatch(("a",))


def test_a_rollout_without_workers_fails():
    state = transitions.observe(rollout("a"), {})
    assert decision_of(state) == Finish(
        RolloutPhase.FAILED, "no worker is left that could be updated"
    )


@pytest.mark.parametrize("step", ["begin", "begin_restore"])
def test_an_invalid_step_raises(step):
    state = rollout("a")
    state = state if step == "begin_restore" else transitions.pause(state)
    with pytest.raises(InvalidStep):
        getattr(transitions, step)(state, ["a"])
    with pytest.raises(InvalidStep, match="not part"):
        transitions.begin(rollout("a"), ["z"])


@given(
    st.lists(st.sampled_from(WorkerPhase), max_size=6),
    st.sampled_from(RolloutPhase),
    st.lists(st.sampled_from(Presence), min_size=6, max_size=6),
)
def test_every_state_has_a_decision(phases, phase, presences):
    workers = tuple(row(f"w{at}", phase=worker_phase) for at, worker_phase in enumerate(phases))
    state = replace(rollout(), workers=workers, phase=phase)
    by_url = {f"w{at}": presence for at, presence in enumerate(presences)}
    decision = transitions.decide(state, by_url)
    if isinstance(decision, NextBatch):
        assert decision.urls
        begin = transitions.begin_restore if decision.restores else transitions.begin
        assert begin(state, decision.urls).busy
    elif isinstance(decision, Finish):
        assert state.ended or transitions.finish(state, decision, "now").ended
    else:
        assert decision.reason
