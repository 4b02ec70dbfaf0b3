from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.api_keys.caller import ApiCaller, LocalRows, slot_totals
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


@dataclass
class Reported:
    prompt_tokens: int
    completion_tokens: int


@given(
    st.integers(0, 3),
    st.lists(
        st.one_of(
            st.just(("begin",)),
            st.just(("end",)),
            st.tuples(st.just("limit"), st.integers(0, 3)),
            st.sampled_from([("publish",), ("rate",)]),
        ),
        max_size=30,
    ),
)
def test_what_is_counted_later_is_in_no_limit_and_in_all_totals(most, steps):
    """Requests begin and end as on the fast path."""
    key = CallerKey(name="a", key_sha256="00" * 32, max_inflight=most)
    rows = LocalRows()
    caller, running, ended, rate = ApiCaller(key, 1, rows), 0, 0, 0
    for step, *values in steps:
        if step == "begin":
            if caller.running < caller.bound:
                caller.running += 1
                began = True
            else:
                began = caller.begin(START) is None
            assert began == (not most or running < most)
            running += began
        elif step == "end" and running:
            running, ended = running - 1, ended + 1
            if caller.counts_later:
                caller.unsorted.append(Reported(3, 4))
                if caller.token_rate:
                    caller.settle(0, caller.tokens.bucket, 7, START)
            else:
                caller.end(0, caller.tokens.bucket, 3, 4, START)
        elif step == "publish":
            caller.publish()
        elif step in ("limit", "rate"):
            most, rate = (values or [most])[0], 10**6 * (step == "rate")
            limits = {"max_inflight": most, "tokens_per_minute": rate}
            caller.configure(CallerKey(name="a", key_sha256="00" * 32, **limits), rows)
        assert caller.in_flight == running
    caller.publish()
    totals = slot_totals([rows.own(1)])
    counted = [totals[n] for n in ("in_flight", "requests", "input_tokens", "output_tokens")]
    assert counted == [running, ended, 3 * ended, 4 * ended]
