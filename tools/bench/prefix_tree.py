"""The cost of the prefix tree: `python -m tools.bench.prefix_tree [--characters N]`.

Fills the tree with prompts like those of chat services (some system prompts, many tails of a few
hundred characters). Measures its memory, a key with its match and insert, complete picks of the
policy, and maintenance; then its memory with long prompts. There are no bounds.
"""

from __future__ import annotations

import argparse
import random
import tracemalloc
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from statistics import median, quantiles
from time import perf_counter

from omni_proxy.config.fields import CAPABILITIES
from omni_proxy.config.overlay import WorkerSpec
from omni_proxy.config.schema import CacheAwareConfig as Rules
from omni_proxy.config.schema import RoutingConfig
from omni_proxy.fleet.worker import Worker
from omni_proxy.routing.inspect.body_fields import body_fields_of
from omni_proxy.routing.inspect.requirements import Requirements
from omni_proxy.routing.policies.cache_aware import CacheAware
from omni_proxy.routing.prefix_tree import PrefixTree
from omni_proxy.routing.tree_key import tree_key

WORKERS = ("http://a", "http://b", "http://c", "http://d")
SYSTEM_PROMPTS = 64
SYSTEM_CHARS = 1500
LONG_CHARS = 8192
LONG_PROMPT = 48_000
LONG_TREE = 4 * 1024 * 1024
PICKS = 2000
SEED = 11


def words(chance: random.Random, chars: int) -> str:
    """Text of a small vocabulary, so that tails branch like natural language."""
    text = ""
    while len(text) < chars:
        size = 2 + int(chance.expovariate(0.25))
        text += "".join(chance.choices("etaoinshrdlu", k=size)) + " "
    return text[:chars]


def prompts(chance: random.Random) -> Iterator[bytes]:
    systems = [words(chance, SYSTEM_CHARS) for _ in range(SYSTEM_PROMPTS)]
    while True:
        tail = words(chance, chance.randint(100, 500))
        yield (chance.choice(systems) + tail).encode()


def filled(characters: int) -> PrefixTree[str]:
    """A tree with prompts whose tails have `characters` characters in total."""
    chance = random.Random(SEED)
    tree: PrefixTree[str] = PrefixTree(characters * 2)
    source = prompts(chance)
    while characters > 0:
        text = next(source)
        tree.insert(tree_key(text), chance.choice(WORKERS))
        characters -= len(text) - SYSTEM_CHARS
    return tree


def timed(call: Callable[[], object]) -> float:
    begun = perf_counter()
    call()
    return perf_counter() - begun


def picks(tree: PrefixTree[str], texts: list[bytes]) -> list[float]:
    """Seconds per text for a key, its match and the insert after it."""

    def one(text: bytes) -> None:
        key = tree_key(text)
        _, held = tree.match(key)
        names = tree.named(held)
        tree.insert(key, names[0] if names else WORKERS[0])

    return [timed(lambda text=text: one(text)) for text in texts]  # type: ignore[misc]


def say(what: str, seconds: list[float]) -> None:
    figures = (median(seconds), quantiles(seconds, n=100)[98], max(seconds))
    middle, last, longest = (f"{figure * 1e6:7.1f} us" for figure in figures)
    print(f"{what:38} median {middle}   p99 {last}   longest {longest}")


def report_picks(tree: PrefixTree[str]) -> None:
    chance = random.Random(SEED + 1)
    known = words(chance, LONG_CHARS - 300)
    grown = [(known + words(chance, 300)).encode() for _ in range(PICKS)]
    alone = [words(chance, LONG_CHARS).encode() for _ in range(PICKS)]
    source = prompts(chance)
    usual = [next(source) for _ in range(PICKS)]
    picks(tree, grown[:1])
    say("8 KB, long beginning known", picks(tree, grown))
    say("8 KB, known whole", picks(tree, grown))
    say("8 KB, nothing known", picks(tree, alone))
    say("system prompt known, 100 to 500 new", picks(tree, usual))


def fleet() -> list[Worker]:
    able = frozenset(CAPABILITIES)
    return [
        Worker(WorkerSpec(url, None, able, False, 1, 0, "api"), datetime.now(UTC))
        for url in WORKERS
    ]


def need(text: str) -> Requirements:
    """The requirements of a chat request whose system prompt is the first half of `text`."""
    half = len(text) // 2
    messages = [
        {"role": "system", "content": text[:half]}, {"role": "user", "content": text[half:]},
    ]  # fmt: skip
    return Requirements(0, decoded=body_fields_of({"messages": messages}))


def report_policy(characters: int) -> None:
    """From the decoded request to the chosen worker: its text, the tree, the loads."""
    chance = random.Random(SEED + 2)
    workers = fleet()
    policy = CacheAware(RoutingConfig(cache_aware=Rules(max_tree_size=characters * 2)), 0.0)
    source = prompts(chance)
    held = 0
    while held < characters:
        text = next(source).decode()
        held += len(text) - SYSTEM_CHARS  # nearly all text that is new in the tree
        policy.record_pick(chance.choice(workers), need(text))
    known = words(chance, LONG_CHARS - 300)
    policy.record_pick(workers[0], need(known))
    grown = [need(known + words(chance, 300)) for _ in range(PICKS // 4)]
    alone = [need(words(chance, LONG_CHARS)) for _ in range(PICKS // 4)]
    for what, needs in (("beginning known", grown), ("nothing known", alone)):
        spent = [timed(lambda n=n: policy.pick(workers, n)) for n in needs]  # type: ignore[misc]
        say(f"whole pick, 8 KB, {what}", spent)


def report_upkeep(tree: PrefixTree[str]) -> None:
    tree.max_size = tree.size // 2
    say("slice of eviction", slices(tree, evict=True))
    tree.forget(WORKERS[0])
    say("slice after forgetting a worker", slices(tree, evict=False))
    tree.clear()
    say("slice of clearing", slices(tree, evict=False))


def slices(tree: PrefixTree[str], *, evict: bool) -> list[float]:
    spent = []
    more = True
    while more:
        begun = perf_counter()
        more = tree.maintain(evict=evict)
        spent.append(perf_counter() - begun)
    return spent


def report_long_prompts() -> None:
    """Fill the tree with long prompts that have no common prefixes."""
    chance = random.Random(SEED + 3)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    tree: PrefixTree[str] = PrefixTree(LONG_TREE)
    count = 0
    while tree.size < LONG_TREE:
        tree.insert(tree_key(chance.randbytes(LONG_PROMPT)), chance.choice(WORKERS))
        count += 1
    held = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    print(
        f"{count} unlike prompts of {LONG_PROMPT} bytes: {tree.size / count:.0f} bytes each in a "
        f"tree, {held / count:.0f} in memory"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.prefix_tree")
    parser.add_argument("--characters", type=int, default=10_000_000)
    asked = parser.parse_args().characters
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    tree = filled(asked)
    held = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    print(
        f"{asked} characters in {tree.size} bytes and {tree.nodes} nodes, "
        f"{held / asked:.2f} bytes of memory per character"
    )
    report_picks(tree)
    report_upkeep(tree)
    report_policy(asked)
    report_long_prompts()


if __name__ == "__main__":
    main()
