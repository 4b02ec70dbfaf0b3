"""The pipeline: stages that compute, a coordinator that routes between them, a client in front.

`coordination` moves requests between stages, `hosting` runs stages in threads and processes.
Invariant: only the coordinator knows which stage follows which; a stage sees messages only.
"""
