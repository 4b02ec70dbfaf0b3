"""Requests in two legs: the policies of the prefill and decode pools, and picking a pair."""
