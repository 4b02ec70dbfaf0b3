"""Delivery of weight versions to workers: from disk, over the network, to workers that come up
late."""
