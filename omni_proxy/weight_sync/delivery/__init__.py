"""Delivery of a weight version to workers: over the process group, from the store, to late joiners."""
