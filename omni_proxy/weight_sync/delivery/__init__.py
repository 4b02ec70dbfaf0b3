"""Delivery of weight versions to workers, from disk or over the network, and catch-up."""
