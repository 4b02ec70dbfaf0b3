"""The router as an object."""

from omni_proxy.compat import Router

__all__ = ["Router"]
