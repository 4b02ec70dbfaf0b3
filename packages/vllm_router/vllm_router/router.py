"""The router as an object."""

from omni_proxy.compat import VllmRouter as Router

__all__ = ["Router"]
