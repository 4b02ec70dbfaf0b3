"""`RouterArgs` of vllm-router, as omni-proxy has it."""

from omni_proxy.compat import VllmRouterArgs as RouterArgs

__all__ = ["RouterArgs"]
