"""Metrics, the recent window, the program's own log, and best-effort lines such as the access log.

Invariant: nothing here fails or delays a request, and memory does not grow with their number.
"""
