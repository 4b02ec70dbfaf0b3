"""Routing: finds the workers that can serve a request, and picks one of them.

`routes` is the table of model paths, `inspect` reads a request, `pick` finds the candidates,
`policies` choose among them. Pure: bodies are read, never modified; randomness is an argument.
Imports point down only; the folders, top to bottom: disaggregation; kv_connectors; policies;
kv_events; inspect.
"""
