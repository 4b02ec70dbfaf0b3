"""The cost of cache-aware routing: KV events, inferred cache contents, feedback of answers."""
