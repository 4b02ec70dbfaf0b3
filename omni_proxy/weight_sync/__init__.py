"""Weight updates of many workers: operations, syncs with trainers, delivery, the store.

Layers, top to bottom: operations, sync, delivery, state and store, worker_calls, protocol.
`protocol` is pure. Imports point down only.
"""
