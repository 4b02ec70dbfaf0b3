from datetime import timedelta

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from omni_proxy.fleet.health_state import LAST_ERROR_CHARS, Health, HealthMachine, Thresholds
from tests.fleet.entries import NOW

OUT = (Health.UNHEALTHY, Health.DEAD)
STATES = st.sampled_from(OUT)


class NaiveMachine:
    """The rules one by one, on lists of the events that each of them counts."""

    def __init__(self, thresholds):
        self.thresholds = thresholds
        self.state = Health.UNKNOWN
        self.run = []  # the last events, all of them good probes or all failures
        self.since_ejected = []  # failures of this run since the last ejection
        self.failed_requests = 0  # failed requests since the last success
        self.tripped = self.half_open = False  # the breaker, and a half-open request in flight

    def receive(self, event):
        if event == "revived":
            state = Health.UNKNOWN if self.state is Health.DEAD else self.state
            self.__init__(self.thresholds)
            self.state = state
        elif event == "killed":
            self.move_to(Health.DEAD)
        elif self.state is not Health.DEAD:
            getattr(self, event.replace(" ", "_"))()

    def move_to(self, state):
        self.state = state
        self.half_open = self.half_open and state is Health.HEALTHY

    def add(self, event):
        good = event == "probe good"
        if self.run and (self.run[-1] == "probe good") != good:
            self.run = []
        self.run.append(event)
        if good:
            self.since_ejected = []
        elif not (self.thresholds.probe_failures_only and event == "request failed"):
            self.since_ejected = [*self.since_ejected, event]

    def probe_good(self):
        self.add("probe good")
        if len(self.run) >= self.thresholds.rise:
            self.move_to(Health.HEALTHY)

    def probe_failed(self):
        self.add("probe failed")
        if len(self.since_ejected) >= self.thresholds.fall:
            self.move_to(self.thresholds.on_threshold)

    def request_failed(self):
        if self.tripped or self.state is Health.UNHEALTHY:
            return
        self.add("request failed")
        self.failed_requests += 1
        at_threshold = (
            len(self.since_ejected) >= self.thresholds.fall
            and not self.thresholds.probe_failures_only
        )
        if at_threshold and "probe failed" in self.run:
            self.move_to(self.thresholds.on_threshold)
        elif at_threshold or 0 < self.thresholds.max_failed_requests <= self.failed_requests:
            self.eject()

    def eject(self):
        self.tripped, self.since_ejected = True, []
        self.move_to(self.thresholds.eject)

    def request_good(self):
        if self.state is Health.HEALTHY and not self.tripped:
            self.failed_requests = 0
            if self.run and self.run[-1] != "probe good" and not self.probed():
                self.run, self.since_ejected = [], []

    def probed(self):
        return "probe failed" in self.run

    def trial_begins(self):
        self.half_open = True

    def trial_failed(self):
        if self.half_open:
            self.add("request failed")
            self.failed_requests += 1
            self.eject()

    def trial_good(self):
        if self.half_open:
            self.tripped, self.half_open, self.failed_requests = False, False, 0

    def trial_without_verdict(self):
        self.half_open = False

    def process_ended(self):
        self.add("process ended")
        self.tripped, self.failed_requests = False, 0
        self.move_to(Health.UNHEALTHY)

    @property
    def counts(self):
        good = bool(self.run) and self.run[-1] == "probe good"
        return len(self.run) if good else 0, 0 if good else len(self.run)


class HealthLife(RuleBasedStateMachine):
    @initialize(
        rise=st.integers(1, 3), fall=st.integers(1, 4), max_failed_requests=st.integers(0, 3),
        on_threshold=STATES, eject=STATES, probe_failures_only=st.booleans(),
    )  # fmt: skip
    def begin(self, rise, fall, max_failed_requests, on_threshold, eject, probe_failures_only):
        self.thresholds = Thresholds(
            rise, fall, on_threshold, eject, max_failed_requests, probe_failures_only
        )
        self.machine, self.naive, self.now = HealthMachine(NOW), NaiveMachine(self.thresholds), NOW
        self.half_open_id = self.old_half_open_id = 0
        self.last = ""

    def advance(self, event):
        """Pass the event to the naive machine; returns its time."""
        self.before = self.machine.state, self.machine.epoch, self.machine.since
        self.now += timedelta(seconds=1)
        self.last = event
        self.naive.receive(event)
        return self.now

    @rule()
    def a_probe_is_good(self):
        self.machine.record_probe_success(self.thresholds, self.advance("probe good"), 200)

    @rule()
    def a_probe_fails(self):
        self.machine.record_probe_failure(
            self.thresholds, self.advance("probe failed"), None, "refused"
        )

    @rule(old=st.booleans())
    def a_request_fails(self, old):
        half_open_id = self.old_half_open_id if old else 0
        before = self.machine.state, self.machine.breaker_tripped
        ejected = self.machine.record_request_failure(
            self.thresholds, self.advance("request failed"), 502, "bad gateway", half_open_id
        )
        assert ejected == (
            (self.machine.state, self.machine.breaker_tripped) != before
            and (self.machine.breaker_tripped)
        )

    @rule(old=st.booleans())
    def a_request_succeeds(self, old):
        self.advance("request good")
        assert not self.machine.record_request_success(self.old_half_open_id if old else 0)

    @precondition(lambda self: self.machine.is_half_open and not self.machine.half_open_id)
    @rule()
    def a_half_open_request_begins(self):
        self.advance("trial begins")
        self.half_open_id = self.machine.begin_half_open()

    @precondition(lambda self: self.half_open_id)
    @rule(end=st.sampled_from(["trial failed", "trial good", "trial without verdict"]))
    def a_half_open_request_ends(self, end):
        self.old_half_open_id, self.half_open_id = self.half_open_id, 0
        runs = self.machine.half_open_id == self.old_half_open_id
        at = self.advance(end if runs else "request failed" if end == "trial failed" else "nothing")
        if end == "trial failed":
            was_half_open = self.machine.record_request_failure(
                self.thresholds, at, None, "reset", self.old_half_open_id
            )
        elif end == "trial good":
            was_half_open = self.machine.record_request_success(self.old_half_open_id)
        else:
            was_half_open = self.machine.end_half_open(self.old_half_open_id)
        assert was_half_open == runs or end == "trial failed"

    @rule()
    def its_process_ends(self):
        self.machine.process_exited(self.advance("process ended"), "SIGKILL")

    @rule()
    def an_operator_marks_it_dead(self):
        epoch = self.machine.epoch
        self.machine.mark_dead(self.advance("killed"))
        assert self.machine.epoch > epoch

    @rule()
    def an_operator_revives_it(self):
        epoch = self.machine.epoch
        self.machine.revive(self.advance("revived"))
        assert self.machine.epoch > epoch

    @invariant()
    def it_equals_the_naive_machine(self):
        machine, naive = self.machine, self.naive
        actual = machine.state, machine.consecutive_successes, machine.consecutive_failures
        assert actual == (naive.state, *naive.counts)
        assert machine.is_half_open == (naive.tripped and naive.state is Health.HEALTHY)
        assert bool(machine.half_open_id) == naive.half_open
        assert machine.failed_requests == naive.failed_requests

    @invariant()
    def a_half_open_machine_has_failed_requests(self):
        assert self.machine.failed_requests or not self.machine.is_half_open

    @invariant()
    def since_changes_only_with_the_state(self):
        if self.last:
            state, _, since = self.before
            moved = self.machine.state is not state
            assert self.machine.since == (self.now if moved else since)

    @invariant()
    def only_a_revival_ends_dead(self):
        if self.last and self.before[0] is Health.DEAD and self.last != "revived":
            assert self.machine.state is Health.DEAD


NaiveMachine.nothing = lambda self: None
TestHealthLife = HealthLife.TestCase


def machine_of(thresholds, *events):
    machine = HealthMachine(NOW)
    for event in events:
        record(machine, thresholds, event)
    return machine


def record(machine, thresholds, event):
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
def test_failed_requests_eject_and_with_a_failed_probe_they_reach_the_threshold(probed):
    events = ["bad probe" if turn == probed else "bad request" for turn in range(3)]
    expected = Health.UNHEALTHY if probed is None else Health.DEAD
    assert machine_of(PLAIN, *UP, *events).state is expected


def test_failed_requests_eject_in_spite_of_a_failed_probe():
    patient = Thresholds(
        fall=10, on_threshold=Health.DEAD, eject=Health.UNHEALTHY, max_failed_requests=3
    )
    machine = machine_of(patient, *UP, "bad probe", "bad request", "bad request")
    assert machine.state is Health.HEALTHY
    record(machine, patient, "bad request")
    assert (machine.state, machine.breaker_tripped) == (Health.UNHEALTHY, True)


def test_a_successful_request_restarts_the_count():
    events = ("bad request", "bad request", "good request", "bad request", "bad request")
    machine = machine_of(PLAIN, *UP, *events)
    assert (machine.state, machine.failed_requests) == (Health.HEALTHY, 2)
    record(machine, PLAIN, "bad request")
    assert machine.state is Health.UNHEALTHY


def test_good_probes_do_not_reset_the_count_of_failed_requests():
    events = ("bad request", "good probe") * 3
    assert machine_of(PLAIN, *UP, *events[:5]).state is Health.UNHEALTHY


def test_without_max_failed_requests_the_failure_threshold_applies():
    never = Thresholds(fall=4, eject=Health.UNHEALTHY, max_failed_requests=0)
    machine = machine_of(never, *UP, *["bad request"] * 3)
    assert machine.state is Health.HEALTHY
    record(machine, never, "bad request")
    assert machine.state is Health.UNHEALTHY


@pytest.mark.parametrize(("max_failed_requests", "failed"), [(0, 50), (10, 9)])
def test_with_probe_failures_only_failed_requests_do_not_reach_the_threshold(
    max_failed_requests, failed
):
    apart = Thresholds(
        fall=2,
        eject=Health.UNHEALTHY,
        max_failed_requests=max_failed_requests,
        probe_failures_only=True,
    )
    machine = machine_of(apart, *UP, *["bad request"] * failed)
    assert machine.state is Health.HEALTHY
    record(machine, apart, "bad probe")
    assert machine.state is Health.HEALTHY
    record(machine, apart, "bad request")
    assert machine.state is (Health.UNHEALTHY if max_failed_requests else Health.HEALTHY)


def test_a_good_probe_resets_the_count_of_failed_probes():
    events = (*UP, "bad probe", "good probe", *["bad request"] * 3)
    assert machine_of(PLAIN, *events).state is Health.UNHEALTHY


def test_an_ejected_worker_dies_after_a_full_threshold_of_failed_probes():
    machine = machine_of(PLAIN, *UP, *["bad request"] * 3)
    for state in (Health.UNHEALTHY, Health.UNHEALTHY, Health.DEAD):
        record(machine, PLAIN, "bad probe")
        assert machine.state is state


def test_requests_from_before_the_ejection_do_not_count():
    machine = machine_of(PLAIN, *UP, *["bad request"] * 3, "good probe")
    for event in ("bad request", "good request", "good probe"):
        record(machine, PLAIN, event)
    assert (machine.state, machine.is_half_open) == (Health.HEALTHY, True)
    for event in ("good request", "bad request"):
        record(machine, PLAIN, event)
    assert (machine.state, machine.is_half_open) == (Health.HEALTHY, True)


def half_open_machine():
    machine = machine_of(PLAIN, *UP, *["bad request"] * 3, *UP)
    assert (machine.state, machine.is_half_open, machine.half_open_id) == (Health.HEALTHY, True, 0)
    return machine


def test_a_failed_half_open_request_ejects_at_once():
    machine = half_open_machine()
    half_open_id = machine.begin_half_open()
    assert machine.record_request_failure(PLAIN, NOW, None, "reset", half_open_id)
    assert (machine.state, machine.half_open_id, machine.breaker_tripped) == (
        Health.UNHEALTHY,
        0,
        True,
    )


def test_a_successful_half_open_request_closes_the_breaker():
    machine = half_open_machine()
    assert machine.record_request_success(machine.begin_half_open())
    assert (machine.is_half_open, machine.failed_requests) == (False, 0)
    record(machine, PLAIN, "bad request")
    assert machine.state is Health.HEALTHY


def test_a_half_open_request_from_before_a_revival_is_ignored():
    machine = half_open_machine()
    half_open_id = machine.begin_half_open()
    machine.revive(NOW)
    assert not machine.is_half_open
    assert not machine.record_request_failure(PLAIN, NOW, None, "reset", half_open_id)
    assert machine.state is Health.HEALTHY


def test_a_long_error_is_truncated():
    machine = HealthMachine(NOW)
    machine.record_probe_failure(Thresholds(), NOW, 500, "x" * 10_000)
    assert machine.last_error == "x" * LAST_ERROR_CHARS
    assert machine.last_status_code == 500


def test_the_exit_reason_of_a_process_is_kept_until_a_new_one_is_ready():
    machine = HealthMachine(NOW)
    machine.process_exited(NOW, "process was ended by SIGKILL")
    machine.record_probe_failure(Thresholds(), NOW, None, "Connection refused")
    machine.record_request_failure(Thresholds(), NOW, None, "Connection refused")
    assert machine.last_error == "process was ended by SIGKILL"
    machine.process_exited(NOW, "process ended with exit status 1")
    assert machine.last_error == "process ended with exit status 1"
    machine.revive(NOW)
    machine.record_probe_failure(Thresholds(), NOW, None, "no answer within 2 s")
    assert machine.last_error == "no answer within 2 s"
    machine.process_exited(NOW, "gone")
    machine.record_probe_success(Thresholds(), NOW, 200)
    machine.record_probe_failure(Thresholds(), NOW, 503, "status=503")
    assert machine.last_error == "status=503"
