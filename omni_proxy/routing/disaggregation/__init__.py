"""Requests in two legs: the policies of the prefill and the decode pool, and the choice of a
pair."""
