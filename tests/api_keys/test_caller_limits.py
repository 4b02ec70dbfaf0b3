from hypothesis import example, given
from hypothesis import strategies as st

from omni_proxy.api_keys.caller_limits import ApiCaller, LocalRows, slot_totals
from omni_proxy.api_keys.rate_window import WINDOW_CELLS, RateWindow
from omni_proxy.config.tables.keys import CallerKey

START = 1000.0
LIMITS = st.sampled_from([0, 5, 1000])
# Seconds since the previous step, reserved tokens, and used tokens.
STEP_SECS = st.sampled_from([0.0, 0.1, 0.49, 0.5, 3.0, 59.9, 61.0])
STEPS = st.lists(
    st.tuples(
        STEP_SECS,
        st.integers(0, 4),
        st.integers(0, 7),
    ),
    max_size=12,
)


def count_tokens(ended):
    """The tokens of responses that have three input and four output tokens each."""
    return 3 * len(ended), 4 * len(ended)


def caller_of(rows=None, **limits):
    return ApiCaller(
        CallerKey(name="a", key_sha256="00" * 32, **limits), 1, rows or LocalRows(), count_tokens
    )


def lines_of(noun, limit, window, now):
    """The expected headers of one limit."""
    remaining = max(0, limit - window.used(now))
    values = {"limit": limit, "remaining": remaining, "reset": window.reset_secs(now)}
    return [f"x-ratelimit-{field}-{noun}: {number}" for field, number in values.items() if limit]


def expected_lines(caller, now):
    caller.rate_rows(now)  # writes all counts into the windows
    lines = lines_of("requests", caller.entry.requests_per_minute, caller.request_window, now)
    lines += lines_of("tokens", caller.entry.tokens_per_minute, caller.token_window, now)
    return "".join(f"{line}\r\n" for line in lines).encode()


@given(LIMITS, LIMITS, STEPS)
def test_headers_always_match_the_windows(requests, tokens, steps):
    caller, now = caller_of(requests_per_minute=requests, tokens_per_minute=tokens), START
    other = caller_of(requests_per_minute=requests, tokens_per_minute=tokens)

    def assert_lines():
        if caller.has_rates:
            assert caller.rate_lines(now) == expected_lines(other, now)

    for pause, reserved, used in steps:
        now += pause
        assert_lines()
        refusal = other.begin(now)
        assert caller.begin(now) == refusal
        if refusal is None:
            taken = caller.reserve(reserved, now)
            assert taken == other.reserve(reserved, now)
            bucket = caller.token_window.bucket
            assert_lines()
            if taken is not None:
                caller.end(taken, bucket, used, 0, now)
                other.end(taken, bucket, used, 0, now)
        assert_lines()


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
def test_deferred_counts_keep_the_limits_and_are_in_all_totals(max_inflight, steps):
    """Requests begin and end here as on the fast path."""
    rows = LocalRows()
    caller, running, ended, rate = caller_of(rows, max_inflight=max_inflight), 0, 0, 0
    for step, *values in steps:
        if step == "begin":
            if caller.begun < caller.fast_path_bound:
                caller.begun += 1
                began = True
            else:
                began = caller.begin(START) is None
            assert began == (not max_inflight or running < max_inflight)
            running += began
        elif step == "end" and running:
            running, ended = running - 1, ended + 1
            if caller.defers_counts:
                caller.uncounted.append((b"", 0, 200))
            else:
                caller.end(0, caller.token_window.bucket, 3, 4, START)
        elif step == "publish":
            caller.publish()
        elif step in ("limit", "rate"):
            max_inflight, rate = (values or [max_inflight])[0], 10**6 * (step == "rate")
            limits = {"max_inflight": max_inflight, "tokens_per_minute": rate}
            caller.configure(CallerKey(name="a", key_sha256="00" * 32, **limits), rows)
        assert caller.in_flight == running
    caller.publish()
    totals = slot_totals([rows.own(1)])
    counted = [totals[n] for n in ("in_flight", "requests", "input_tokens", "output_tokens")]
    assert counted == [running, ended, 3 * ended, 4 * ended]


@given(
    st.integers(1, 6), st.integers(0, 3), st.lists(st.tuples(STEP_SECS, st.booleans()), max_size=60)
)
@example(1, 0, [(secs, False) for secs in (0.0, 3.0, 59.9, 0.49, 59.9, 0.0)])
def test_requests_between_two_publications_keep_the_limits(rate, max_inflight, steps):
    """Compared with a list of the times at which requests began."""
    caller, now, running = caller_of(requests_per_minute=rate, max_inflight=max_inflight), START, 0
    began = []
    for pause, ends in steps:
        now += pause
        if ends and running:
            running -= 1
            caller.uncounted.append((b"", 0, 200))
        elif (refusal := caller.begin(now)) is None:
            running, began = running + 1, [*began, now]
            assert sum(each >= now - 60 for each in began) <= rate
            assert not max_inflight or running <= max_inflight
        elif refusal == "max_inflight":
            assert running == max_inflight
        else:
            # A request leaves the window at most half a second late.
            assert sum(each >= now - 60.5 for each in began) >= rate
        if pause > 3:
            caller.publish()


@given(st.integers(1, 30), STEPS)
def test_deferred_token_counts_equal_those_of_an_immediate_window(limit, steps):
    caller, now, window = caller_of(tokens_per_minute=limit), START, RateWindow([0] * WINDOW_CELLS)
    open_requests = []
    for pause, reserved, used in steps:
        now += pause
        assert caller.begin(now) is None
        taken = caller.reserve(reserved, now)
        assert (taken is not None) == window.take(min(reserved, limit), limit, now)
        if taken is None:
            caller.cancel(caller.request_window.bucket, now)
        else:
            open_requests.append((taken, caller.token_window.bucket, window.bucket, used))
        if used % 2 and open_requests:  # some end in a later bucket
            taken, bucket, same, tokens = open_requests.pop(0)
            caller.end(taken, bucket, tokens, 0, now)
            window.settle(taken, same, tokens, now)
        assert caller.tokens_used(now) == window.used(now)
        assert caller.has_no_tokens_left(now) == (window.used(now) >= limit)
