"""Profiling: events of requests, torch traces, and reports computed from the events.

Invariant: recording never raises and never changes a response.
"""
