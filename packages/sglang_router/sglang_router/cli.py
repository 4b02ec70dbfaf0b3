"""The command `sglang-router`."""

from omni_proxy.compat.scripts import sglang_main as main

__all__ = ["main"]
