from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from omni_proxy.fleet.health_state import Health
from omni_proxy.routing.pick import eligible_workers
from omni_proxy.routing.version_constraint import VersionConstraint
from tests.dataplane.queue_fixture import Room
from tests.example_counts import examples
from tests.fleet.entries import NOW, entry, heal


class QueueMachine(RuleBasedStateMachine):
    """Compares the queue with a plain list of waiters that is searched from its start."""

    @initialize(bound=st.integers(0, 3), limits=st.lists(st.integers(0, 2), min_size=1, max_size=3))
    def begin(self, bound, limits):
        models = (None, "m", "n")
        self.entries = [
            entry(name, model=models[at], max_inflight=limits[at]) for at, name in
            zip(range(len(limits)), "abc", strict=False)
        ]  # fmt: skip
        self.room = Room(*self.entries, config=f"queue_size = 6\nmax_inflight = {bound}")
        self.all = []

    def teardown(self):
        if hasattr(self, "room"):
            self.room.close()

    def waiting(self):
        return [waiter for waiter in self.all if waiter.phase == "queue" and not waiter.granted]

    def drop(self, waiter):
        self.all.remove(waiter)

    @rule(model=st.sampled_from([None, "m", "n"]), label=st.sampled_from([None, None, "v1", "v2"]))
    def a_request_arrives(self, model, label):
        waiter = self.room.arrive(model, VersionConstraint(label) if label else None)
        if not waiter.refusal:
            self.all.append(waiter)
        else:
            waiter.finish()

    @precondition(lambda self: self.room.admitted)
    @rule(data=st.data())
    def an_exchange_ends(self, data):
        ended = data.draw(st.sampled_from(self.room.admitted))
        self.drop(ended)
        ended.finish()

    @precondition(lambda self: self.waiting())
    @rule(data=st.data(), late=st.booleans())
    def a_waiter_gives_up(self, data, late):
        waiter = data.draw(st.sampled_from(self.waiting()))
        self.drop(waiter)
        if late:
            waiter.on_phase_timeout()
            waiter.finish()
        else:
            waiter.disconnect()

    @precondition(lambda self: any(waiter.granted for waiter in self.all))
    @rule()
    def an_admitted_waiter_disconnects(self):
        waiter = next(waiter for waiter in self.all if waiter.granted)
        self.drop(waiter)
        waiter.disconnect()

    @rule(data=st.data())
    def a_worker_dies_or_is_revived(self, data):
        worker = data.draw(st.sampled_from(self.room.fleet.workers))
        if worker.health.state is Health.HEALTHY:
            self.room.fleet.mark_dead(worker, NOW)
        else:
            self.room.fleet.revive(worker, NOW)
            heal(self.room.fleet, worker)

    @rule(data=st.data(), label=st.sampled_from(["v1", "v2"]))
    def a_worker_gets_another_version(self, data, label):
        fleet = self.room.fleet
        fleet.set_version(data.draw(st.sampled_from(fleet.workers)), label, 0)

    @rule(data=st.data())
    def an_update_of_a_worker_starts_or_ends(self, data):
        fleet = self.room.fleet
        worker = data.draw(st.sampled_from(fleet.workers))
        (fleet.uncordon if worker.cordon_reasons else fleet.cordon)(worker, "updating")

    @rule()
    def the_loop_iterates(self):
        self.room.run_ready_tasks()

    @invariant()
    def no_waiter_can_be_admitted(self):
        dataplane = self.room.dataplane
        for waiter in self.waiting() if dataplane.inflight.has_slot() else []:
            assert waiter.wants != "slot"
            assert not eligible_workers(dataplane.fleet, waiter.exchange.requirements)

    @invariant()
    def waiters_with_equal_requirements_are_admitted_in_order(self):
        for granted in [waiter for waiter in self.all if waiter.granted]:
            before = [w for w in self.waiting() if w.joined < granted.joined]
            assert granted.wants not in [waiter.wants for waiter in before]

    @invariant()
    def the_limits_hold(self):
        room, dataplane = self.room, self.room.dataplane
        bound = dataplane.settings.config.server.max_inflight
        assert not bound or dataplane.in_flight <= bound
        for worker in room.fleet.workers:
            assert not worker.max_inflight or worker.in_flight <= worker.max_inflight
            assert worker.in_flight >= 0
        assert 0 <= room.queue.waiting <= 6

    @invariant()
    def no_waiter_is_lost(self):
        assert self.room.queue.waiting == len(self.waiting())
        lines = self.room.queue._lines.values()
        assert sum(len(line.waiters) for line in lines) == len(self.waiting())


QueueMachine.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=40)
TestQueueMachine = QueueMachine.TestCase
