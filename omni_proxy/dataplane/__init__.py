"""The data plane: an HTTP/1.1 relay on raw sockets, the hot path of the program.

One trio task, the event loop, owns every socket here and resumes a plain coroutine for each client
connection. Invariant: nothing in this package awaits trio but `EventLoop.run`, the sweeps of
`timeouts` and the watch of `certificates`; what an exchange holds is given back in its own
`finally`; no byte reaches a worker that `wire` has not validated.
"""
