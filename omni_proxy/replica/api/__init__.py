"""HTTP over a live client: routes, bodies and streams, and nothing of the pipeline behind it.

Invariant: a module here mounts its routes with `mount(app, served)`; every request that is left
early, by its caller's disconnect above all, leaves its generation and so aborts it.
"""
