from datetime import timedelta

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from omni_proxy.fleet.health_state import LAST_ERROR_CHARS, Health, HealthMachine, Thresholds
from tests.fleet.entries import NOW

OUT = (Health.UNHEALTHY, Health.DEAD)
STATES = st.sampled_from(OUT)


class Naive:
    """The rules one by one, on the lists of what happened since each of them began to count."""

    def __init__(self, thresholds):
        self.thresholds = thresholds
        self.state = Health.UNKNOWN
        self.row = []  # good probes or failures, whichever came last
        self.since_ejected = []  # failures of that row
        self.unanswered = 0  # failed requests without a good answer in between
        self.owes = self.trying = False

    def receive(self, event):
        if event == "revived":
            state = Health.UNKNOWN if self.state is Health.DEAD else self.state
            self.__init__(self.thresholds)
            self.state = state
        elif event == "killed":
            self.go(Health.DEAD)
        elif self.state is not Health.DEAD:
            getattr(self, event.replace(" ", "_"))()

    def go(self, state):
        self.state = state
        self.trying = self.trying and state is Health.HEALTHY

    def add(self, event):
        good = event == "probe good"
        if self.row and (self.row[-1] == "probe good") != good:
            self.row = []
        self.row.append(event)
        if good:
            self.since_ejected = []
        elif not (self.thresholds.probe_failures_only and event == "request failed"):
            self.since_ejected = [*self.since_ejected, event]

    def probe_good(self):
        self.add("probe good")
        if len(self.row) >= self.thresholds.rise:
            self.go(Health.HEALTHY)

    def probe_failed(self):
        self.add("probe failed")
        if len(self.since_ejected) >= self.thresholds.fall:
            self.go(self.thresholds.on_threshold)

    def request_failed(self):
        if self.owes or self.state is Health.UNHEALTHY:
            return
        self.add("request failed")
        self.unanswered += 1
        enough = (
            len(self.since_ejected) >= self.thresholds.fall
            and not self.thresholds.probe_failures_only
        )
        if enough and "probe failed" in self.row:
            self.go(self.thresholds.on_threshold)
        elif enough or 0 < self.thresholds.max_failed_requests <= self.unanswered:
            self.eject()

    def eject(self):
        self.owes, self.since_ejected = True, []
        self.go(self.thresholds.eject)

    def request_good(self):
        if self.state is Health.HEALTHY and not self.owes:
            self.unanswered = 0
            if self.row and self.row[-1] != "probe good" and not self.probed():
                self.row, self.since_ejected = [], []

    def probed(self):
        return "probe failed" in self.row

    def trial_begins(self):
        self.trying = True

    def trial_failed(self):
        if self.trying:
            self.add("request failed")
            self.unanswered += 1
            self.eject()

    def trial_good(self):
        if self.trying:
            self.owes, self.trying, self.unanswered = False, False, 0

    def trial_without_verdict(self):
        self.trying = False

    def process_ended(self):
        self.add("process ended")
        self.owes, self.unanswered = False, 0
        self.go(Health.UNHEALTHY)

    @property
    def counts(self):
        good = bool(self.row) and self.row[-1] == "probe good"
        return len(self.row) if good else 0, 0 if good else len(self.row)


class HealthLife(RuleBasedStateMachine):
    @initialize(
        rise=st.integers(1, 3), fall=st.integers(1, 4), max_failed_requests=st.integers(0, 3),
        on_threshold=STATES, eject=STATES, probe_failures_only=st.booleans(),
    )  # fmt: skip
    def begin(self, rise, fall, max_failed_requests, on_threshold, eject, probe_failures_only):
        self.thresholds = Thresholds(
            rise, fall, on_threshold, eject, max_failed_requests, probe_failures_only
        )
        self.machine, self.naive, self.now = HealthMachine(NOW), Naive(self.thresholds), NOW
        self.trial = self.old_trial = 0
        self.last = ""

    def passes(self, event):
        self.before = self.machine.state, self.machine.epoch, self.machine.since
        self.now += timedelta(seconds=1)
        self.last = event
        self.naive.receive(event)
        return self.now

    @rule()
    def a_probe_is_good(self):
        self.machine.record_probe_success(self.thresholds, self.passes("probe good"), 200)

    @rule()
    def a_probe_fails(self):
        self.machine.record_probe_failure(
            self.thresholds, self.passes("probe failed"), None, "refused"
        )

    @rule(old=st.booleans())
    def a_request_fails(self, old):
        trial = self.old_trial if old else 0
        before = self.machine.state, self.machine.breaker_tripped
        ejected = self.machine.record_request_failure(
            self.thresholds, self.passes("request failed"), 502, "bad gateway", trial
        )
        assert ejected == (
            (self.machine.state, self.machine.breaker_tripped) != before
            and (self.machine.breaker_tripped)
        )

    @rule(old=st.booleans())
    def a_request_is_answered_well(self, old):
        self.passes("request good")
        assert not self.machine.record_request_success(self.old_trial if old else 0)

    @precondition(lambda self: self.machine.is_half_open and not self.machine.half_open_id)
    @rule()
    def a_trial_begins(self):
        self.passes("trial begins")
        self.trial = self.machine.begin_half_open()

    @precondition(lambda self: self.trial)
    @rule(end=st.sampled_from(["trial failed", "trial good", "trial without verdict"]))
    def a_trial_ends(self, end):
        self.old_trial, self.trial = self.trial, 0
        runs = self.machine.half_open_id == self.old_trial
        at = self.passes(end if runs else "request failed" if end == "trial failed" else "nothing")
        if end == "trial failed":
            reported = self.machine.record_request_failure(
                self.thresholds, at, None, "reset", self.old_trial
            )
        elif end == "trial good":
            reported = self.machine.record_request_success(self.old_trial)
        else:
            reported = self.machine.end_half_open(self.old_trial)
        assert reported == runs or end == "trial failed"

    @rule()
    def its_process_ends(self):
        self.machine.process_exited(self.passes("process ended"), "SIGKILL")

    @rule()
    def an_operator_buries_it(self):
        epoch = self.machine.epoch
        self.machine.mark_dead(self.passes("killed"))
        assert self.machine.epoch > epoch

    @rule()
    def an_operator_revives_it(self):
        epoch = self.machine.epoch
        self.machine.revive(self.passes("revived"))
        assert self.machine.epoch > epoch

    @invariant()
    def it_is_what_its_history_says(self):
        machine, naive = self.machine, self.naive
        reported = machine.state, machine.consecutive_successes, machine.consecutive_failures
        assert reported == (naive.state, *naive.counts)
        assert machine.is_half_open == (naive.owes and naive.state is Health.HEALTHY)
        assert bool(machine.half_open_id) == naive.trying
        assert machine.failed_requests == naive.unanswered

    @invariant()
    def who_is_on_trial_has_something_to_make_good(self):
        assert self.machine.failed_requests or not self.machine.is_half_open

    @invariant()
    def since_moves_with_the_state_only(self):
        if self.last:
            state, _, since = self.before
            moved = self.machine.state is not state
            assert self.machine.since == (self.now if moved else since)

    @invariant()
    def dead_is_left_by_revival_only(self):
        if self.last and self.before[0] is Health.DEAD and self.last != "revived":
            assert self.machine.state is Health.DEAD


Naive.nothing = lambda self: None
TestHealthLife = HealthLife.TestCase


def machine_of(thresholds, *events):
    machine = HealthMachine(NOW)
    for event in events:
        tell(machine, thresholds, event)
    return machine


def tell(machine, thresholds, event):
    match event:
        case "good probe":
            machine.record_probe_success(thresholds, NOW, 200)
        case "bad probe":
            machine.record_probe_failure(thresholds, NOW, None, "refused")
        case "bad request":
            machine.record_request_failure(thresholds, NOW, 502, "bad gateway")
        case "good request":
            machine.record_request_success(0)


PLAIN = Thresholds(
    rise=2, fall=3, on_threshold=Health.DEAD, eject=Health.UNHEALTHY, max_failed_requests=3
)
UP = ("good probe", "good probe")


@pytest.mark.parametrize("probed", [None, 0, 2])
def test_request_failures_alone_eject_and_one_failed_probe_makes_it_the_threshold(probed):
    events = ["bad probe" if turn == probed else "bad request" for turn in range(3)]
    wanted = Health.UNHEALTHY if probed is None else Health.DEAD
    assert machine_of(PLAIN, *UP, *events).state is wanted


def test_one_failed_probe_does_not_save_it_from_its_failed_requests():
    patient = Thresholds(
        fall=10, on_threshold=Health.DEAD, eject=Health.UNHEALTHY, max_failed_requests=3
    )
    machine = machine_of(patient, *UP, "bad probe", "bad request", "bad request")
    assert machine.state is Health.HEALTHY
    tell(machine, patient, "bad request")
    assert (machine.state, machine.breaker_tripped) == (Health.UNHEALTHY, True)


def test_a_good_answer_in_between_begins_the_run_anew():
    events = ("bad request", "bad request", "good request", "bad request", "bad request")
    machine = machine_of(PLAIN, *UP, *events)
    assert (machine.state, machine.failed_requests) == (Health.HEALTHY, 2)
    tell(machine, PLAIN, "bad request")
    assert machine.state is Health.UNHEALTHY


def test_good_probes_do_not_hide_that_every_request_fails():
    events = ("bad request", "good probe") * 3
    assert machine_of(PLAIN, *UP, *events[:5]).state is Health.UNHEALTHY


def test_with_no_bound_on_tries_the_failure_threshold_still_counts():
    never = Thresholds(fall=4, eject=Health.UNHEALTHY, max_failed_requests=0)
    machine = machine_of(never, *UP, *["bad request"] * 3)
    assert machine.state is Health.HEALTHY
    tell(machine, never, "bad request")
    assert machine.state is Health.UNHEALTHY


@pytest.mark.parametrize(("tries", "failed"), [(0, 50), (10, 9)])
def test_counted_apart_only_the_bound_on_tries_ejects_for_failed_requests(tries, failed):
    apart = Thresholds(
        fall=2, eject=Health.UNHEALTHY, max_failed_requests=tries, probe_failures_only=True
    )
    machine = machine_of(apart, *UP, *["bad request"] * failed)
    assert machine.state is Health.HEALTHY
    tell(machine, apart, "bad probe")
    assert machine.state is Health.HEALTHY
    tell(machine, apart, "bad request")
    assert machine.state is (Health.UNHEALTHY if tries else Health.HEALTHY)


def test_a_good_probe_forgets_a_failed_one():
    events = (*UP, "bad probe", "good probe", *["bad request"] * 3)
    assert machine_of(PLAIN, *events).state is Health.UNHEALTHY


def test_what_was_ejected_dies_of_failed_probes_only_after_the_whole_threshold():
    machine = machine_of(PLAIN, *UP, *["bad request"] * 3)
    for state in (Health.UNHEALTHY, Health.UNHEALTHY, Health.DEAD):
        tell(machine, PLAIN, "bad probe")
        assert machine.state is state


def test_requests_from_before_the_ejection_do_not_count():
    machine = machine_of(PLAIN, *UP, *["bad request"] * 3, "good probe")
    for event in ("bad request", "good request", "good probe"):
        tell(machine, PLAIN, event)
    assert (machine.state, machine.is_half_open) == (Health.HEALTHY, True)
    for event in ("good request", "bad request"):
        tell(machine, PLAIN, event)
    assert (machine.state, machine.is_half_open) == (Health.HEALTHY, True)


def on_trial():
    machine = machine_of(PLAIN, *UP, *["bad request"] * 3, *UP)
    assert (machine.state, machine.is_half_open, machine.half_open_id) == (Health.HEALTHY, True, 0)
    return machine


def test_a_trial_that_fails_puts_it_out_at_once():
    machine = on_trial()
    trial = machine.begin_half_open()
    assert machine.record_request_failure(PLAIN, NOW, None, "reset", trial)
    assert (machine.state, machine.half_open_id, machine.breaker_tripped) == (
        Health.UNHEALTHY,
        0,
        True,
    )


def test_a_trial_that_succeeds_brings_it_back_whole():
    machine = on_trial()
    assert machine.record_request_success(machine.begin_half_open())
    assert (machine.is_half_open, machine.failed_requests) == (False, 0)
    tell(machine, PLAIN, "bad request")
    assert machine.state is Health.HEALTHY


def test_the_verdict_of_a_trial_from_before_a_revival_is_void():
    machine = on_trial()
    trial = machine.begin_half_open()
    machine.revive(NOW)
    assert not machine.is_half_open
    assert not machine.record_request_failure(PLAIN, NOW, None, "reset", trial)
    assert machine.state is Health.HEALTHY


def test_a_long_error_is_kept_in_part():
    machine = HealthMachine(NOW)
    machine.record_probe_failure(Thresholds(), NOW, 500, "x" * 10_000)
    assert machine.last_error == "x" * LAST_ERROR_CHARS
    assert machine.last_status_code == 500


def test_why_a_process_has_exited_is_kept_until_another_is_ready():
    machine = HealthMachine(NOW)
    machine.process_exited(NOW, "process ended with signal SIGKILL")
    machine.record_probe_failure(Thresholds(), NOW, None, "Connection refused")
    machine.record_request_failure(Thresholds(), NOW, None, "Connection refused")
    assert machine.last_error == "process ended with signal SIGKILL"
    machine.process_exited(NOW, "process ended with exit status 1")
    assert machine.last_error == "process ended with exit status 1"
    machine.revive(NOW)
    machine.record_probe_failure(Thresholds(), NOW, None, "no answer within 2 s")
    assert machine.last_error == "no answer within 2 s"
    machine.process_exited(NOW, "gone")
    machine.record_probe_success(Thresholds(), NOW, 200)
    machine.record_probe_failure(Thresholds(), NOW, 503, "status=503")
    assert machine.last_error == "status=503"
