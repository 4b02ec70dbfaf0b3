"""Requests in two legs: a prefill worker computes the prompt, a decode worker the response."""
