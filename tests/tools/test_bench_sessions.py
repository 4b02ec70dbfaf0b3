"""The sessions of the bench and its simulated engine, in virtual time and without a proxy."""

import pytest
import trio
from trio.testing import MockClock

from tools.bench.harness.simulated_engine import SimulatedEngine
from tools.bench.sessions import TURNS, make_sessions


def test_a_seed_determines_the_sessions():
    assert make_sessions(9, 1) == make_sessions(9, 1)
    assert make_sessions(9, 1) != make_sessions(9, 2)
    for turns in make_sessions(50, 3):
        assert TURNS[0] <= len(turns) <= TURNS[1]
        prompts = [turn.prompt_tokens for turn in turns]
        assert prompts == sorted(set(prompts))  # each prompt contains the one before it


def run(script, **options):
    """The engine and the result of `script`, run in virtual time."""

    async def main():
        engine = SimulatedEngine(**options)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(engine.run_steps)
            result = await script(engine)
            nursery.cancel_scope.cancel()
        return engine, result

    return trio.run(main, clock=MockClock(autojump_threshold=0))


async def turn(engine, session, prompt, answer=10):
    """How many seconds the turn took."""
    began_at = trio.current_time()
    await engine.generate({"session": session, "prompt_tokens": prompt, "max_tokens": answer})
    return trio.current_time() - began_at


async def together(engine, *turns):
    async with trio.open_nursery() as nursery:
        for each in turns:
            nursery.start_soon(turn, engine, *each)


def test_cached_tokens_are_not_computed_again():
    async def script(engine):
        first = await turn(engine, "a", 5000)
        again = await turn(engine, "a", 5010)
        other = await turn(engine, "b", 5010)
        return first, again, other

    engine, (first, again, other) = run(script)
    assert engine.cached_tokens == 5010
    assert other == pytest.approx(first, rel=0.01)
    assert again < first / 2


def test_the_cache_evicts_the_least_recently_used_session():
    async def script(engine):
        for session in ("a", "b", "a", "c", "b"):
            before = engine.cached_tokens
            await turn(engine, session, 1000, answer=1)
            cached_tokens.append(engine.cached_tokens - before)

    cached_tokens = []
    run(script, cache_tokens=2100)
    assert cached_tokens == [0, 0, 1000, 0, 0]


def test_requests_are_decoded_together_and_a_slowdown_applies_to_all_steps():
    async def script(engine):
        began_at = trio.current_time()
        await together(engine, *((f"s{number}", 10, 50) for number in range(8)))
        batch = trio.current_time() - began_at
        alone = await turn(engine, "x", 10, 50)
        engine.slowdown = 3.0
        slow = await turn(engine, "y", 10, 50)
        return batch, alone, slow

    engine, (batch, alone, slow) = run(script)
    assert alone < batch < 2 * alone
    assert slow == pytest.approx(3 * alone, rel=0.01)
    assert engine.lateness == pytest.approx(1.0)
