"""`RouterArgs` of sglang-router, as omni-proxy has it."""

from omni_proxy.compat import SglangRouterArgs as RouterArgs

__all__ = ["RouterArgs"]
