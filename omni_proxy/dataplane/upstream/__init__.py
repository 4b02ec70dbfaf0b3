"""Upstream connections and the choice of a worker: pools, acquisition, reports of engines."""
