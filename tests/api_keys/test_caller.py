from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.api_keys.caller import ApiCaller, LocalRows
from omni_proxy.config.api_keys import CallerKey

START = 1000.0
LIMITS = st.sampled_from([0, 5, 1000])
# Seconds since the step before, tokens that are reserved, and tokens that come of it.
STEPS = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.1, 0.49, 0.5, 3.0, 59.9, 61.0]),
        st.integers(0, 4),
        st.integers(0, 7),
    ),
    max_size=12,
)


def lines_of(noun, limit, window, now):
    """What the headers of one limit should be."""
    left = max(0, limit - window.used(now))
    reported = {"limit": limit, "remaining": left, "reset": window.reset_secs(now)}
    return [f"x-ratelimit-{what}-{noun}: {number}" for what, number in reported.items() if limit]


def expected_lines(caller, now):
    lines = lines_of("requests", caller.entry.requests_per_minute, caller.requests, now)
    lines += lines_of("tokens", caller.entry.tokens_per_minute, caller.tokens, now)
    return "".join(f"{line}\r\n" for line in lines).encode()


@given(LIMITS, LIMITS, STEPS)
def test_headers_tell_what_the_windows_hold_at_each_time(requests, tokens, steps):
    key = CallerKey(
        name="a", key_sha256="00" * 32, requests_per_minute=requests, tokens_per_minute=tokens
    )
    caller, now = ApiCaller(key, 1, LocalRows()), START
    for pause, reserved, used in steps:
        now += pause
        assert caller.rate_lines(now) == expected_lines(caller, now)
        if caller.begin(now) is None:
            bucket, taken = caller.tokens.bucket, caller.reserve(reserved, now)
            assert caller.rate_lines(now) == expected_lines(caller, now)
            if taken is not None:
                caller.end(taken, bucket, used, 0, now)
        assert caller.rate_lines(now) == expected_lines(caller, now)
