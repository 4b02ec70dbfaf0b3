"""Metrics, the recent window, the program's own log, and best-effort lines such as the access log.

Invariant: nothing here may fail a request, delay it or grow with it.
"""
