"""The version that programs compare: that of the release whose interface this has.

The environment variable OMNI_PROXY_VLLM_ROUTER_VERSION replaces it.
"""

import os

__version__ = os.environ.get("OMNI_PROXY_VLLM_ROUTER_VERSION", "0.1.17+omni")
