"""`python -m vllm_router.launch_router`, and what trainers import from here."""

import sys

from omni_proxy.compat import VllmRouter as Router
from omni_proxy.compat import VllmRouterArgs as RouterArgs
from omni_proxy.compat import launch_vllm_router as launch_router
from omni_proxy.compat.scripts import launch_vllm as main
from omni_proxy.compat.scripts import parse_vllm_args as parse_router_args

__all__ = ["Router", "RouterArgs", "launch_router", "main", "parse_router_args"]

if __name__ == "__main__":
    sys.exit(main())
