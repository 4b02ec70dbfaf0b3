"""Profiling: events of requests, torch traces, and reports made of the events.

Invariant: recording never raises and never changes a response.
"""
