"""Weight updates of many workers: operations, sync sessions with trainers, delivery, the store.

Layers, top to bottom: operations, session, delivery, state and store, worker_calls, protocol.
`protocol` is pure. Imports point down only.
"""
