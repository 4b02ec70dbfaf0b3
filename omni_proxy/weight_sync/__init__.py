"""Weight updates of many workers: operations, syncs with trainers, delivery, the store.

Layers, top to bottom: operations, sync, delivery, state and store, worker_calls, protocol.
Invariant: imports point down only, and `protocol` does no I/O.
"""
