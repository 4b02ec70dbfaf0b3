"""Weight updates of many workers: operations, sync sessions with trainers, delivery, the version store.

Layers, top to bottom: operations, session, delivery, store, protocol. `protocol` is pure.
"""
