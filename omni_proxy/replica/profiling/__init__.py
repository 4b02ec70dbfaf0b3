"""Profiling: events of requests on their way, torch traces, and the reports made of both.

Invariant: recording never raises and never changes what a request gets.
"""
