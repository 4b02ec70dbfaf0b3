"""A plain model of the admission queue: a list in order of arrival, searched from its start.

It shares no rule with the queue: eligibility is stated again, for requests with a model and a
version constraint. Only the choice among eligible workers, and whether a model that no worker has
is refused at once, are taken from the waiter.
"""

from omni_proxy.fleet.health_state import Health

SLOT = "slot"


class PlainQueue:
    """`waiting`: pairs of a waiter and what it waits for, `SLOT` or (model, label)."""

    def __init__(self, fleet, size, max_inflight):
        self.fleet, self.size, self.max_inflight = fleet, size, max_inflight
        self.waiting = []
        self.admitted = []  # waiters that have resumed, and hold a worker
        self.resuming = []  # pairs of a waiter and what it has got, in order of admission
        self.refused = []  # pairs of a waiter and whether it has a slot until it ends

    def eligible(self, model, label):
        workers = [
            worker
            for worker in self.fleet.workers
            if worker.health.state is Health.HEALTHY and not worker.cordon_reasons
        ]
        if model and any(worker.model for worker in workers):
            workers = [worker for worker in workers if worker.model == model]
        if label:
            workers = [worker for worker in workers if worker.weight_version.label == label]
        return [
            worker
            for worker in workers
            if not worker.max_inflight or self.in_flight_at(worker) < worker.max_inflight
        ]

    def in_flight(self):
        refused = sum(has_slot for _, has_slot in self.refused)
        return len(self.admitted) + len(self.resuming) + refused

    def in_flight_at(self, worker):
        holders = self.admitted + [waiter for waiter, got in self.resuming if got != SLOT]
        return sum(waiter.exchange.worker is worker for waiter in holders)

    def has_slot(self):
        return not self.max_inflight or self.in_flight() < self.max_inflight

    def arrive(self, waiter, model, label):
        if self.has_slot():
            self._acquire(waiter, (model, label))
        else:
            self._wait(waiter, SLOT)

    def _acquire(self, waiter, wants):
        """The waiter, which has a slot, gets a worker or waits for one without the slot."""
        model, _ = wants
        if workers := self.eligible(*wants):
            assert waiter.exchange.worker in workers
            self.admitted.append(waiter)
        elif waiter.refusal and waiter.refusal.code == "model_not_found":
            assert model
            assert model not in [worker.model for worker in self.fleet.workers]
            self.refused.append((waiter, True))
        else:
            self.serve()
            self._wait(waiter, wants)

    def _wait(self, waiter, wants):
        if len(self.waiting) < self.size:
            self.waiting.append((waiter, wants))
        else:
            self.refused.append((waiter, False))

    def serve(self):
        """Admit each waiter that can be admitted, the one that arrived first before the others."""
        for waiter, wants in list(self.waiting):
            if not self.has_slot():
                return
            if wants != SLOT:
                workers = self.eligible(*wants)
                if not workers:
                    continue
                assert waiter.exchange.worker in workers
            self.waiting.remove((waiter, wants))
            self.resuming.append((waiter, wants))

    def resume(self):
        """The admitted waiters run, in order of their admission."""
        for waiter, got in list(self.resuming):
            self.resuming.remove((waiter, got))
            if got == SLOT:
                self._acquire(waiter, (waiter.model, waiter.label))
            else:
                self.admitted.append(waiter)

    def leave(self, waiter):
        """The waiter ends, whatever it has or waits for."""
        self.waiting = [each for each in self.waiting if each[0] is not waiter]
        self.resuming = [each for each in self.resuming if each[0] is not waiter]
        self.refused = [each for each in self.refused if each[0] is not waiter]
        self.admitted = [each for each in self.admitted if each is not waiter]
        self.serve()
