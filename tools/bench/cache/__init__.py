"""What routing by caches costs: KV events beside inferring, and learning from answers."""
