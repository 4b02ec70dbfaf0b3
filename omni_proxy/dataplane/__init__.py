"""The door: our own HTTP/1.1 relay on raw sockets, and the one hot path of the program.

One trio task, the pump, owns every socket here and resumes one plain coroutine per client
connection. Invariant: nothing in this room awaits trio but `Pump.run` and `clocks.run`; each
exchange's accounts are settled in its own `finally`; no byte reaches a worker that `wire` has not
judged.
"""
