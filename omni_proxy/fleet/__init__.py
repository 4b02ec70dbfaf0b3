"""The fleet: every worker that may be routed to, and what is known of it.

Invariant: all changes are synchronous atoms of `Fleet`, so no reader ever sees half of one. Pure:
it probes nothing, dials nothing and reads no clock; `watch`, `admin_api` and `dataplane` bring it the facts.
"""
