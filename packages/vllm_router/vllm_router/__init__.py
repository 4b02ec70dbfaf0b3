"""omni-proxy under the name of vllm_router."""

from omni_proxy.compat import VllmRouter as Router
from vllm_router.version import __version__ as __version__

__all__ = ["Router"]
