"""Tensor parallelism: one text model over several processes, each with a part of every layer.

Rank 0, the leader, runs in the text stage's thread and schedules; the other ranks, its followers,
are child processes that repeat each of its steps. The scheduler uses them as an ordinary model.
"""
