"""What the proxy costs, beside a peer, on this machine: CPU per request and per streamed event.

Everything it needs is in this folder: a fake worker and a load generator in C, built when first
run. It talks to 127.0.0.1 only, is bounded in connections and time, and ends what it started.
"""
