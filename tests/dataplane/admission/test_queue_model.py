from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from omni_proxy.fleet.health_state import Health
from omni_proxy.routing.version_constraint import VersionConstraint
from tests.dataplane.admission.plain_queue import PlainQueue
from tests.dataplane.queue_fixture import Room
from tests.example_counts import examples
from tests.fleet.entries import NOW, entry, heal

SIZE = 6


class QueueMachine(RuleBasedStateMachine):
    """Compares the queue with a plain list of waiters that is searched from its start."""

    @initialize(bound=st.integers(0, 3), limits=st.lists(st.integers(0, 2), min_size=1, max_size=3))
    def begin(self, bound, limits):
        models = (None, "m", "n")
        entries = [
            entry(name, model=models[at], max_inflight=limits[at]) for at, name in
            zip(range(len(limits)), "abc", strict=False)
        ]  # fmt: skip
        self.room = Room(*entries, config=f"queue_size = {SIZE}\nmax_inflight = {bound}")
        self.plain = PlainQueue(self.room.fleet, SIZE, bound)

    def teardown(self):
        if hasattr(self, "room"):
            self.room.close()

    def queued(self):
        return [waiter for waiter, _ in self.plain.waiting]

    def resuming(self):
        return [waiter for waiter, _ in self.plain.resuming]

    @rule(model=st.sampled_from([None, "m", "n"]), label=st.sampled_from([None, None, "v1", "v2"]))
    def a_request_arrives(self, model, label):
        waiter = self.room.arrive(model, VersionConstraint(label) if label else None)
        waiter.label = label
        self.plain.arrive(waiter, model, label)

    @precondition(lambda self: self.plain.admitted)
    @rule(data=st.data())
    def an_exchange_ends(self, data):
        ended = data.draw(st.sampled_from(self.plain.admitted))
        ended.finish()
        self.plain.leave(ended)

    @precondition(lambda self: self.plain.refused)
    @rule()
    def a_refused_exchange_ends(self):
        waiter, _ = self.plain.refused[0]
        waiter.finish()
        self.plain.leave(waiter)

    @precondition(lambda self: self.plain.waiting)
    @rule(data=st.data(), late=st.booleans())
    def a_waiter_gives_up(self, data, late):
        waiter = data.draw(st.sampled_from(self.queued()))
        if late:
            waiter.on_phase_timeout()
            waiter.finish()
        else:
            waiter.disconnect()
        self.plain.leave(waiter)

    @precondition(lambda self: self.plain.resuming)
    @rule(data=st.data())
    def an_admitted_waiter_disconnects(self, data):
        waiter = data.draw(st.sampled_from(self.resuming()))
        waiter.disconnect()
        self.plain.leave(waiter)

    @rule(data=st.data())
    def a_worker_dies_or_is_revived(self, data):
        worker = data.draw(st.sampled_from(self.room.fleet.workers))
        if worker.health.state is Health.HEALTHY:
            self.room.fleet.mark_dead(worker, NOW)
        else:
            self.room.fleet.revive(worker, NOW)
            heal(self.room.fleet, worker)
        self.plain.serve()

    @rule(data=st.data(), label=st.sampled_from(["v1", "v2"]))
    def a_worker_gets_another_version(self, data, label):
        fleet = self.room.fleet
        fleet.set_version(data.draw(st.sampled_from(fleet.workers)), label, 0)
        self.plain.serve()

    @rule(data=st.data())
    def an_update_of_a_worker_starts_or_ends(self, data):
        fleet = self.room.fleet
        worker = data.draw(st.sampled_from(fleet.workers))
        (fleet.uncordon if worker.cordon_reasons else fleet.cordon)(worker, "updating")
        self.plain.serve()

    @rule()
    def the_loop_iterates(self):
        self.room.run_ready_tasks()
        self.plain.resume()

    @invariant()
    def each_waiter_is_where_the_plain_list_has_it(self):
        for waiter in self.queued():
            assert (waiter.phase, waiter.granted, waiter.refusal) == ("queue", False, None)
        for waiter in self.resuming():
            assert (waiter.phase, waiter.granted) == ("queue", True)
        assert self.room.admitted == self.plain.admitted
        assert all(waiter.refusal for waiter, _ in self.plain.refused)

    @invariant()
    def the_counts_are_those_of_the_plain_list(self):
        room, plain = self.room, self.plain
        assert room.queue.waiting == len(plain.waiting)
        assert sum(len(line.waiters) for line in room.queue._lines.values()) == len(plain.waiting)
        assert room.dataplane.in_flight == plain.in_flight()
        for worker in room.fleet.workers:
            assert worker.in_flight == plain.in_flight_at(worker)

    @invariant()
    def the_limits_hold(self):
        bound = self.plain.max_inflight
        assert not bound or self.room.dataplane.in_flight <= bound
        for worker in self.room.fleet.workers:
            assert not worker.max_inflight or worker.in_flight <= worker.max_inflight
        assert self.room.queue.waiting <= SIZE


QueueMachine.TestCase.settings = settings(max_examples=examples(800), stateful_step_count=40)
TestQueueMachine = QueueMachine.TestCase
