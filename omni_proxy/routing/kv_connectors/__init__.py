"""The KV transfer protocols of requests in two legs: request bodies, and reading of responses.

One file per protocol. All are pure: they edit bodies; random numbers are arguments.
"""
