"""The simulated engine and the sessions of the bench, in virtual time and without a proxy."""

import pytest
import trio
from trio.testing import MockClock

from tools.bench.harness import simulated_engine
from tools.bench.harness.simulated_engine import SimulatedEngine
from tools.bench.sessions import TURNS, make_sessions


def test_the_same_seed_gives_the_same_sessions_and_another_one_others():
    assert make_sessions(9, 1) == make_sessions(9, 1)
    assert make_sessions(9, 1) != make_sessions(9, 2)
    for turns in make_sessions(50, 3):
        assert TURNS[0] <= len(turns) <= TURNS[1]
        prompts = [turn.prompt_tokens for turn in turns]
        assert prompts == sorted(set(prompts))  # each has all that came before, and more


def run(script):
    """The engine and what `script` returns, at virtual time."""

    async def main():
        engine = SimulatedEngine()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(engine._steps)
            got = await script(engine)
            nursery.cancel_scope.cancel()
        return engine, got

    return trio.run(main, clock=MockClock(autojump_threshold=0))


async def turn(engine, session, prompt, answer=10):
    """Seconds that it took."""
    began_at = trio.current_time()
    await engine._generate({"session": session, "prompt_tokens": prompt, "max_tokens": answer})
    return trio.current_time() - began_at


async def together(engine, *turns):
    async with trio.open_nursery() as nursery:
        for each in turns:
            nursery.start_soon(turn, engine, *each)


def test_what_is_cached_is_not_computed_again():
    async def script(engine):
        first = await turn(engine, "a", 5000)
        again = await turn(engine, "a", 5010)
        other = await turn(engine, "b", 5010)
        return first, again, other

    engine, (first, again, other) = run(script)
    assert engine.cached_tokens == 5010
    assert other == pytest.approx(first, rel=0.01)
    assert again < first / 2


def test_the_cache_forgets_the_session_that_was_used_longest_ago(monkeypatch):
    monkeypatch.setattr(simulated_engine, "CACHE_TOKENS", 2100)

    async def script(engine):
        for session in ("a", "b", "a", "c", "b"):
            before = engine.cached_tokens
            await turn(engine, session, 1000, answer=1)
            yield_of.append(engine.cached_tokens - before)

    yield_of = []
    run(script)
    assert yield_of == [0, 0, 1000, 0, 0]


def test_requests_are_decoded_together_and_a_slow_engine_is_slow_in_all():
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
