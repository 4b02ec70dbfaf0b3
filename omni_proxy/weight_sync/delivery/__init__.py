"""Delivery of weight versions to workers: from disk, over the network, to workers that return
late."""
