"""The cost of routing by KV events: `python -m tools.bench.kv_events [--tokens N]`.

Eight workers have a million cached tokens each; one of them has each prompt of token ids. Measures
the CPU of decoding a body and picking a worker with `source = "events"` and `"inferred"`, the
memory of a block, the subscriber process's CPU per event, and the longest turn of the event loop
for one of its messages. There are no bounds.
"""

from __future__ import annotations

import argparse
import json
import random
from datetime import UTC, datetime
from statistics import median
from time import process_time

import msgspec

from omni_proxy.config.fields import CAPABILITIES
from omni_proxy.config.overlay import WorkerSpec
from omni_proxy.config.parse import parse
from omni_proxy.fleet.worker import Worker
from omni_proxy.routing.inspect.body_fields import decode_body
from omni_proxy.routing.inspect.requirements import Requirements
from omni_proxy.routing.kv_events.block_index import BlockIndex
from omni_proxy.routing.kv_events.block_keys import block_keys
from omni_proxy.routing.kv_events.engine_blocks import (
    ChangeOp,
    HeldChange,
    pack_changes,
    unpack_changes,
)
from omni_proxy.routing.kv_events.publisher_state import PublisherState
from omni_proxy.routing.policies import Policy, build_policy

WORKERS = 8
CACHED_TOKENS = 1_000_000  # of each
BLOCK = 16
EVENTS = 2000
PICKS = 400
ROUNDS = 12
SEED = 13
CONFIG = """[routing]
policy = "cache_aware"
[routing.cache_aware]
source = "{source}"
max_tree_size = 67108864
"""

Prompt = list[int]


def prompts(chance: random.Random, tokens: int) -> list[Prompt]:
    count = WORKERS * CACHED_TOKENS // tokens
    return [[chance.randrange(150_000) for _ in range(tokens)] for _ in range(count)]


def fleet() -> list[Worker]:
    able = frozenset(CAPABILITIES)
    specs = [WorkerSpec(f"http://w{n}", None, able, False, 1, 0, "api") for n in range(WORKERS)]
    return [Worker(spec, datetime.now(UTC)) for spec in specs]


def filled(workers: list[Worker], cached: list[Prompt]) -> BlockIndex:
    index = BlockIndex()
    for number, prompt in enumerate(cached):
        url = workers[number % WORKERS].url
        begun = [HeldChange(ChangeOp.BLOCK_SIZE, [BLOCK]), HeldChange(ChangeOp.EXACT, [])]
        stored = HeldChange(ChangeOp.STORE, list(block_keys(prompt, BLOCK)))
        index.apply(url, [*(begun if number < WORKERS else ()), stored])
    return index


def report_picks(tokens: int) -> None:
    chance = random.Random(SEED)
    workers, cached = fleet(), prompts(chance, tokens)
    index = filled(workers, cached)
    bodies = [
        json.dumps({"input_ids": each}, separators=(",", ":")).encode()
        for each in chance.sample(cached, PICKS)
    ]
    sources = {name: policy_of(name, index) for name in ("inferred", "events")}
    costs: dict[str, list[float]] = {name: [] for name in sources}
    for _ in range(ROUNDS):
        for name, policy in sources.items():
            costs[name].append(picked(policy, workers, bodies))
    for name, spent in costs.items():
        print(f"body decoded and worker picked, {name:9} {median(spent) * 1e6:7.1f} us")
    more = median(e - i for e, i in zip(costs["events"], costs["inferred"], strict=True))
    print(f"events more than inferred, of {tokens} tokens {more * 1e6:7.1f} us")
    print(f"index: {index.blocks} blocks, {index.memory_bytes / index.blocks:.0f} bytes each")


def policy_of(source: str, index: BlockIndex) -> Policy:
    policy = build_policy(parse(CONFIG.format(source=source)).routing, lambda below: 0, 0.0)
    policy.use_blocks(index)
    return policy


def picked(policy: Policy, workers: list[Worker], bodies: list[bytes]) -> float:
    """CPU seconds per pick."""
    begun = process_time()
    for body in bodies:
        policy.pick(workers, Requirements(0, decoded=decode_body(body)))
    return (process_time() - begun) / len(bodies)


def report_events() -> None:
    chance = random.Random(SEED)
    payloads = [payload(chance, number) for number in range(EVENTS)]
    state = PublisherState(replays=False)
    begun = process_time()
    for number, each in enumerate(payloads):
        state.receive(number, each, 0.0)
    spent = process_time() - begun
    print(f"subscriber process, an event of 64 tokens {spent / EVENTS * 1e6:7.1f} us")
    index, turns = BlockIndex(), []
    for packed in pack_changes(state.take_changes()):
        begun = process_time()
        index.apply("http://w0", unpack_changes([packed]))
        turns.append(process_time() - begun)
    print(f"event loop, an event of 64 tokens         {sum(turns) / EVENTS * 1e6:7.1f} us")
    print(f"event loop, longest turn                  {max(turns) * 1e3:7.2f} ms")


def payload(chance: random.Random, number: int) -> bytes:
    tokens = [chance.randrange(150_000) for _ in range(4 * BLOCK)]
    event = {
        "type": "BlockStored", "block_hashes": [chance.getrandbits(64) for _ in range(4)],
        "parent_block_hash": None, "token_ids": tokens, "block_size": BLOCK, "medium": "GPU",
    }  # fmt: skip
    return msgspec.msgpack.encode([float(number + 1), [event], 0])


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures routing by KV events.")
    parser.add_argument(
        "--tokens", type=int, default=1024, metavar="N", help="tokens of each prompt"
    )
    report_picks(parser.parse_args().tokens)
    report_events()


if __name__ == "__main__":
    main()
