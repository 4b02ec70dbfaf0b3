"""How many examples Hypothesis tries. The numbers in tests are for `tools/test --thorough`; other
runs try a share of them, by profile."""

from __future__ import annotations

from hypothesis import settings

MIN_EXAMPLES = 5
SHARES = {"thorough": 1.0, "patient": 0.25, "fast": 0.1}


def thorough() -> bool:
    return settings.get_current_profile_name() == "thorough"


def examples(count: int) -> int:
    """The share of `count` that the profile of this run tries."""
    share = SHARES.get(settings.get_current_profile_name(), 1.0)
    return max(round(count * share), MIN_EXAMPLES)
