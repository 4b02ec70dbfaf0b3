"""The version that programs compare: that of the release whose interface this has.

Some images expect a certain text in it (slime's fork: "slime"): the environment variable
OMNI_PROXY_SGLANG_ROUTER_VERSION replaces it.
"""

import os

__version__ = os.environ.get("OMNI_PROXY_SGLANG_ROUTER_VERSION", "0.3.2+omni")
