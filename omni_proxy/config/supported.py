"""What this build does not do yet, as one table: key -> the values that it takes today.

A value that is not listed is refused, never ignored. A key that is not listed takes everything
that its type takes: building a feature ends with deleting its line here.
"""

from typing import Final

NOT_YET: Final[dict[str, tuple[object, ...]]] = {
    "routing.voice_owner": ("",),
}


def not_yet(key: str, value: object) -> str:
    """Why this value of a key (written without list indices) is refused, or ""."""
    today = NOT_YET.get(key)
    asked = value if isinstance(value, list) else [value]
    if today is None or all(one in today for one in asked):
        return ""
    refused = next(one for one in asked if one not in today)
    return f"{toml(refused)} is not supported yet (today: {', '.join(map(toml, today))})"


def toml(value: object) -> str:
    """The value as one would write it in FILE."""
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)
