"""What engines' KV events say: which blocks of tokens each engine has in its prefix cache.

`event_payload` decodes batches, `publisher_state` decides what of them can be believed and keeps
the engine's names of blocks, `block_index` has the blocks of all workers by names of our own
(`block_keys`) and is what policies ask. Pure: sockets and clocks are the caller's.
"""
