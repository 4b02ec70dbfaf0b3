"""One text model over several processes: each rank holds a part of every layer (tensor parallel).

Rank 0, the leader, lives in the text stage's thread and decides; the others, its followers, are
child processes that repeat each of its steps. What the scheduler sees is an ordinary model.
"""
