"""A value as a person would write it in FILE, for messages and generated pages."""


def toml(value: object) -> str:
    """Booleans in lower case, strings in quotes."""
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)
