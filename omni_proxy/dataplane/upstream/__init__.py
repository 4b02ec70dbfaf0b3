"""Upstream connections and the choice of a worker: pools, the balancer, reports of engines."""
