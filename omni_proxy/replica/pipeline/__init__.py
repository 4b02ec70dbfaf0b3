"""The pipeline: stages that compute, a coordinator that routes between them, a client in front.

`coordination` moves requests between stages; `runtime` runs the stages, in threads (`stage`) and
processes (`stage_process`). Invariant: only the coordinator decides which stage follows which; a
stage only handles messages.
"""
