"""A prefix cache of an engine that publishes its events, and the state of its subscriber."""

import msgspec

from omni_proxy.routing.kv_events.block_keys import PromptBlocks, block_keys, encode_token_ids
from omni_proxy.routing.kv_events.publisher_state import (
    PublisherState,
)
from omni_proxy.routing.token_id_text import TokenIdText

SIZE = 2


class Engine:
    """A prefix cache that publishes its events and keeps the last batches for a replay."""

    def __init__(self, at=100.0, *, kept=1000):
        self.at = at
        self.kept = kept
        self.prompts = {}  # by block hash: the tokens up to the end of the block
        self.log = []
        self.cached = []  # the cached prompts after each batch

    def _publish(self, *events):
        self.at += 1.0
        payload = msgspec.msgpack.encode([self.at, list(events), 0])
        self.log.append((len(self.log), payload))
        self.cached.append(set(self.prompts.values()))
        return self.log[-1]

    def store(self, tokens, *, medium="GPU", salt=None):
        hashes, new = [], []
        for end in range(SIZE, len(tokens) + 1, SIZE):
            name = hash((salt, tokens[:end]))
            hashes.append(name)
            if salt is None:
                new.append((name, tokens[:end]))
        self.prompts.update(new)
        return self._publish({
            "type": "BlockStored", "block_hashes": hashes, "parent_block_hash": None,
            "token_ids": tokens[: len(hashes) * SIZE], "block_size": SIZE, "medium": medium,
            "extra_keys": [[salt] if salt else None] * len(hashes),
        })  # fmt: skip

    def remove(self, name):
        self.prompts.pop(name, None)
        return self._publish({"type": "BlockRemoved", "block_hashes": [name], "medium": "GPU"})

    def flush(self):
        """Publishes nothing yet: vLLM sends the event with its next batch."""
        self.prompts.clear()

    def clear(self):
        self.prompts.clear()
        return self._publish({"type": "AllBlocksCleared"})

    def replay(self, state, now=0.0):
        start, state.replay_from = state.replay_from, None
        for number, payload in self.log[-self.kept :]:
            if number >= start:
                state.replayed(number, payload, now)
        state.replay_ended(now)


def blocks_of(tokens, size=SIZE):
    return PromptBlocks(TokenIdText(encode_token_ids(list(tokens)), len(tokens)), size)


def keys_of(prompts):
    return {list(block_keys(tokens, SIZE))[-1] for tokens in prompts}


def keys_in(state):
    return set(state.blocks.keys())


def state_after(engine, *batches, replays=False):
    """The state of a subscriber that received the batches, or all that were published."""
    state = PublisherState(replays=replays)
    for number, payload in batches or engine.log:
        state.receive(number, payload, 0.0)
    return state
