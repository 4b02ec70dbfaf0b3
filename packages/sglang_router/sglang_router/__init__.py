"""omni-proxy under the name of sglang_router."""

from sglang_router.version import __version__ as __version__
