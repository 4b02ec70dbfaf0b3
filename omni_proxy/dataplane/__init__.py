"""The data plane: an HTTP/1.1 relay on raw sockets, the hot path of the program.

One trio task, the event loop, owns every socket here and resumes a plain coroutine for each client
connection. Invariant: only `EventLoop.run`, the timers and sweeps of `timers`, and the poll of
`Certificates` await trio; an exchange releases its resources in its own `finally`; no byte reaches
a worker that `wire` has not validated.
"""
