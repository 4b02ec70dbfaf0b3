"""The fleet: the workers that requests may be routed to, and the state of each.

`registry` has the set of workers, `worker` one worker and its state as a value for other processes,
`health_state` the health state machine, `outlier_ejection` the circuit breaker, `voice_registry`
the registry of uploaded voices; a worker drains in `runtime_config.worker_drain`.
Invariant: each change is one synchronous method, so no reader sees a partial change. Must not do
I/O, read a clock or make JSON.
"""
