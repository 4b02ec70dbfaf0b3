"""Chooses workers for others that carry the requests: Envoy, and trainers that route in process."""
