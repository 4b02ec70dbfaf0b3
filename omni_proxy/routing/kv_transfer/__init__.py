"""The protocols by which a request runs in two legs: what each engine gets, and what is read of it.

One file per protocol. All are pure: bodies are spliced, rooms and ids come as arguments.
"""
