"""Measures CPU per request and per streamed event of the proxy and of peers on this machine.

Its fake worker and load generator are C programs in this folder, built on first use. Invariant: it
connects only to 127.0.0.1, is bounded in connections and time, and ends the processes it started.
"""
