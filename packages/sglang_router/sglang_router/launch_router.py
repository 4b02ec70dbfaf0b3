"""`python -m sglang_router.launch_router`, and what trainers import from here."""

import sys

from omni_proxy.compat import Router, launch_router
from omni_proxy.compat import SglangRouterArgs as RouterArgs
from omni_proxy.compat.scripts import launch_sglang as main
from omni_proxy.compat.scripts import parse_sglang_args as parse_router_args

__all__ = ["Router", "RouterArgs", "launch_router", "main", "parse_router_args"]

if __name__ == "__main__":
    sys.exit(main())
