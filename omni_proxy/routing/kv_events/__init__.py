"""KV events of engines: the blocks of tokens that each engine has in its prefix cache.

`event_payload` decodes batches; `publisher_state` validates their order and stores the engine's
hashes of blocks; `block_index` has the blocks of all workers by the proxy's own keys
(`block_keys`), for policies to query. Pure: sockets and clocks are left to the caller.
"""
