"""The fleet: the workers that requests may be routed to, and the state of each.

`registry` has the set of workers, `worker` one of them, `health` its state machine, `worker_state`
its state as a value for other processes, `voices` the registry of uploaded voices. Invariant: each
change is one synchronous method, so no reader sees half of it. No I/O, no clock, no JSON.
"""
