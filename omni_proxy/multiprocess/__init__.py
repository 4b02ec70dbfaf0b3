"""Several door processes behind one port, and the one process that leads them.

Control (today's program: front, prober, keeper, weights) holds the listening sockets, judges health
and tells every door how the fleet stands; a door routes by what it was told last, and tells what it
has learnt. Requests in flight are counted in memory that all of them share. With one process none
of this runs.
"""
