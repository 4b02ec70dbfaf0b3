"""FILE from disk, with one kind of error for all that can be wrong with it."""

from pathlib import Path

from omni_proxy.config.parse import ConfigError, Problem, parse
from omni_proxy.config.schema import Config


def load(path: Path) -> Config:
    """Raises ConfigError, also for a file that cannot be read."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        problem = Problem("", None, f"cannot be read: {error.strerror}", file=str(path))
        raise ConfigError([problem], str(path)) from None
    return parse(raw, str(path))
