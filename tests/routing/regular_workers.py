"""The worker checks of `choose_target`, for a fleet of regular workers."""

from omni_proxy.routing.pick import eligible_workers, no_worker_error


class RegularWorkers:
    def __init__(self, fleet, owner="", *, held=()):
        self._fleet = fleet
        self._owner = owner
        self._held = held  # the workers that sessions wait for

    def can_take(self, need):
        return bool(eligible_workers(self._fleet, need, self._owner))

    def has_tried_all(self, need, tried):
        workers = eligible_workers(self._fleet, need, self._owner)
        return bool(workers) and all(target.worker in tried for target in workers)

    def error_for(self, need):
        return no_worker_error(self._fleet, need, self._owner)

    def held_worker(self, need):
        return next((worker for worker in self._held if worker.serves(need.model)), None)
