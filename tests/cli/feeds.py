"""Snapshots of a proxy as GET /feed returns them: written by hand, or drawn by Hypothesis."""

from __future__ import annotations

from datetime import datetime

from hypothesis import strategies as st

from omni_proxy.admin_api.serializers.slow_workers import slow_workers

AT = "2026-11-21T19:00:00+00:00"
# Text with control characters of terminals, line breaks and wide characters.
ODD = st.text(
    st.one_of(st.characters(codec="utf-8"), st.sampled_from("\x1b\n\r\t\x00\x9b\u202e\u200b界é|")),
    max_size=40,
)


def row(name="a:1", **fields):
    return {
        "id": f"http%3A%2F%2F{name}", "url": f"http://{name}", "display_id": name,
        "health": "healthy", "routable": True, "answers": 9, **fields,
    }  # fmt: skip


def feed(*rows, **fields):
    """A snapshot with these rows, with the texts about slow workers as a proxy computes them."""
    slow = slow_workers(rows, datetime.fromisoformat(AT).timestamp())
    rows = [
        {**row, "slow": slow[row["id"]]._asdict() if row["id"] in slow else None} for row in rows
    ]
    return {
        "at": AT, "version": "0.1.0", "pid": 7, "uptime_secs": 61.0, "revision": 3,
        "ready": any(row["routable"] for row in rows), "fleet": list(rows),
        "policy": {"name": "random"}, **fields,
    }  # fmt: skip


def point(at, requests=0, errors=0, **fields):
    return {"at": at, "requests": requests, "errors": errors, **fields}


_TIMES = st.one_of(st.none(), st.floats(0, 1e12), st.floats(allow_nan=False, allow_infinity=False))
_ROWS = st.fixed_dictionaries(
    {"id": st.text(min_size=1, max_size=8), "url": ODD},
    optional={
        "display_id": ODD,
        "model": st.one_of(st.none(), ODD),
        "health": st.one_of(st.sampled_from(("healthy", "dead", "unknown", "unhealthy")), ODD),
        "routable": st.booleans(),
        "disabled": st.booleans(),
        "half_open": st.booleans(),
        "held_by": st.lists(ODD, max_size=2),
        "why": st.one_of(st.none(), ODD),
        "since": st.one_of(st.none(), st.just(AT), ODD),
        "in_flight": st.integers(0, 2**40),
        "max_inflight": st.integers(0, 9),
        "rate": st.floats(0, 1e9),
        "errors": st.integers(0, 10**9),
        "answers": st.integers(0, 10),
        "first_p50_ms": _TIMES,
        "first_p99_ms": _TIMES,
        "silent_secs": _TIMES,
        "weight_version": st.one_of(st.none(), ODD),
        "weight_epoch": st.integers(0, 2**40),
        "drain": st.one_of(st.none(), st.builds(dict, state=ODD, in_flight=st.integers(0, 9))),
    },
)
FEEDS = st.fixed_dictionaries(
    {
        "at": st.one_of(st.just(AT), ODD),
        "revision": st.integers(0, 2**40),
        "ready": st.booleans(),
        "fleet": st.lists(_ROWS, max_size=20, unique_by=lambda row: row["id"]),
    },
    optional={
        "version": ODD,
        "uptime_secs": st.floats(0, 1e12),
        "leaving": st.booleans(),
        "metrics": st.booleans(),
        "config_file": st.one_of(st.none(), ODD),
        "policy": st.dictionaries(st.just("name"), ODD),
        "history": st.lists(
            st.builds(
                dict, at=st.integers(0, 2**33), requests=st.integers(0, 10**6),
                errors=st.integers(0, 10**6), first_p99_ms=_TIMES,
            ),
            max_size=20,
        ),
        "recent_ends": st.lists(
            st.builds(
                dict, at=ODD, route=ODD, model=st.one_of(st.none(), ODD), end=ODD,
                status=st.integers(0, 999), worker=st.one_of(st.none(), ODD), total_ms=_TIMES,
            ),
            max_size=5,
        ),
        "last_reload": st.one_of(
            st.none(),
            st.dictionaries(
                st.sampled_from(("outcome", "source", "at", "diff", "error")),
                st.recursive(
                    st.one_of(st.none(), st.integers(), ODD),
                    lambda inner: st.one_of(
                        st.lists(inner, max_size=3),
                        st.dictionaries(
                            st.one_of(
                                st.sampled_from(("changed", "workers", "problems", "path")), ODD
                            ),
                            inner,
                            max_size=3,
                        ),
                    ),
                    max_leaves=8,
                ),
            ),
        ),
        "supervisors": st.lists(st.builds(dict, name=ODD, state=ODD), max_size=3),
        "discovery": st.lists(
            st.builds(
                dict, name=ODD, state=ODD, error=st.one_of(st.none(), ODD), age_secs=_TIMES,
                workers=st.dictionaries(ODD, st.integers(0, 10**6), max_size=2),
                ignored=st.dictionaries(ODD, ODD, max_size=2),
            ),
            max_size=2,
        ),
    },
)  # fmt: skip
