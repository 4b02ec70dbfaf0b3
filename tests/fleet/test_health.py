from datetime import timedelta

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from omni_proxy.fleet.health import LAST_ERROR_CHARS, Health, HealthMachine, Thresholds
from tests.fleet.entries import NOW

FAILURES = ("probe failed", "request failed", "process ended")


def naive(history: list[str], thresholds: Thresholds) -> tuple[Health, int, int]:
    """State, good ones in a row, bad ones in a row: told anew from the whole history."""
    state, run = Health.UNKNOWN, []
    for event in history:
        if event == "revived":
            run = []
            state = Health.UNKNOWN if state is Health.DEAD else state
        elif event == "killed":
            state = Health.DEAD
        elif state is not Health.DEAD:
            if run and (run[-1] == "good") != (event == "good"):
                run = []
            run = [*run, event]
            if event == "good":
                state = Health.HEALTHY if len(run) >= thresholds.rise else state
            elif event == "process ended":
                state = Health.UNHEALTHY
            elif len(run) >= thresholds.fall:
                probed = "probe failed" in run
                state = thresholds.on_threshold if probed else thresholds.eject
    good = bool(run) and run[-1] == "good"
    return state, len(run) if good else 0, 0 if good else len(run)


class HealthLife(RuleBasedStateMachine):
    @initialize(
        rise=st.integers(1, 4),
        fall=st.integers(1, 4),
        on_threshold=st.sampled_from([Health.DEAD, Health.UNHEALTHY]),
        eject=st.sampled_from([Health.DEAD, Health.UNHEALTHY]),
    )
    def begin(self, rise, fall, on_threshold, eject):
        self.thresholds = Thresholds(rise, fall, on_threshold, eject)
        self.machine, self.history, self.now = HealthMachine(NOW), [], NOW

    def passes(self):
        self.before = self.machine.state, self.machine.epoch, self.machine.since
        self.now += timedelta(seconds=1)
        return self.now

    @rule()
    def a_probe_is_good(self):
        self.machine.succeed(self.thresholds, self.passes(), 200)
        self.history.append("good")

    @rule(probe=st.booleans())
    def something_fails(self, probe):
        self.machine.fail(self.thresholds, self.passes(), None, "refused", probe=probe)
        self.history.append("probe failed" if probe else "request failed")

    @rule()
    def its_process_ends(self):
        self.machine.lose(self.passes(), "SIGKILL")
        self.history.append("process ended")

    @rule()
    def an_operator_buries_it(self):
        epoch = self.machine.epoch
        self.machine.kill(self.passes())
        assert self.machine.epoch > epoch
        self.history.append("killed")

    @rule()
    def an_operator_revives_it(self):
        epoch = self.machine.epoch
        self.machine.revive(self.passes())
        assert self.machine.epoch > epoch
        self.history.append("revived")

    @invariant()
    def it_is_what_its_history_says(self):
        machine = self.machine
        told = machine.state, machine.consecutive_successes, machine.consecutive_failures
        assert told == naive(self.history, self.thresholds)

    @invariant()
    def since_moves_with_the_state_only(self):
        if self.history:
            state, _, since = self.before
            moved = self.machine.state is not state
            assert self.machine.since == (self.now if moved else since)

    @invariant()
    def dead_is_left_by_revival_only(self):
        if self.history and self.before[0] is Health.DEAD and self.history[-1] != "revived":
            assert self.machine.state is Health.DEAD


TestHealthLife = HealthLife.TestCase


def test_request_failures_alone_eject_and_one_failed_probe_makes_it_the_threshold():
    thresholds = Thresholds(fall=3, on_threshold=Health.DEAD, eject=Health.UNHEALTHY)
    for probed, end in ((None, Health.UNHEALTHY), (0, Health.DEAD), (2, Health.DEAD)):
        machine = HealthMachine(NOW)
        for turn in range(3):
            machine.fail(thresholds, NOW, 502, "bad gateway", probe=turn == probed)
        assert machine.state is end


def test_a_good_probe_forgets_a_failed_one():
    thresholds = Thresholds(rise=9, fall=2, on_threshold=Health.DEAD, eject=Health.UNHEALTHY)
    machine = HealthMachine(NOW)
    machine.fail(thresholds, NOW, None, "refused", probe=True)
    machine.succeed(thresholds, NOW, 200)
    for _ in range(2):
        machine.fail(thresholds, NOW, None, "reset", probe=False)
    assert machine.state is Health.UNHEALTHY


def test_a_long_error_is_kept_in_part():
    machine = HealthMachine(NOW)
    machine.fail(Thresholds(), NOW, 500, "x" * 10_000, probe=True)
    assert machine.last_error == "x" * LAST_ERROR_CHARS
    assert machine.last_status_code == 500
