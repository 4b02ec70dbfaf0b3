"""`python -m sglang_router.launch_server`: replicas, and the proxy in front of them."""

import sys

from omni_proxy.compat.scripts import launch_server as main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
