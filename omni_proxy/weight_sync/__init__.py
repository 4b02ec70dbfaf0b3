"""Weight updates of many workers: operations, rollouts, syncs with trainers, delivery, the store.

`weight_operations` is the entry point that the admin API calls. The layers below it, top to bottom:
rollout; operations, sync; delivery; store, state_journal, worker_calls; protocol.
Invariant: imports point down only, and `protocol` is pure.
"""
