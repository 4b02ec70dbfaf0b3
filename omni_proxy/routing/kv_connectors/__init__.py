"""The KV transfer protocols of requests in two legs: request bodies, and reading of responses.

One file per protocol; `dataplane.disaggregation.two_leg_request` runs them. All are pure: they edit
bodies; random numbers are arguments.
"""
