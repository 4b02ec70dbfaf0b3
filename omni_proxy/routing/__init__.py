"""Routing: which workers can serve a request, and which of them gets it.

`routes` is the table of model paths, `inspect` reads a request, `pick` finds the candidates,
`policies` choose among them. Pure: a body is read and never changed; randomness is an argument.
"""
