"""omni-proxy: one process in front of complete inference replicas.

`docs/design.md` describes each package.
"""

__version__ = "0.1.0"

from omni_proxy import native

native.use()
