"""Requests in two legs: one worker computes the prompt, another one goes on from it."""
