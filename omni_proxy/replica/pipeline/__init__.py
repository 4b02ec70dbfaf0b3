"""The pipeline: stages that compute, a coordinator that routes between them, a client before it.

Invariant: only the coordinator knows which stage follows which; a stage sees messages alone.
"""
