"""Drop-in Python packages: `RouterArgs` and `launch_router` of sglang-router and vllm-router.

The two distributions under `packages/` re-export these names under the names that trainers import.
Contract: the command line of omni-proxy determines what each argument does; this package only
translates arguments.
"""

from omni_proxy.compat.sglang_router_args import SglangRouterArgs as SglangRouterArgs
from omni_proxy.compat.start_router import Router as Router
from omni_proxy.compat.start_router import RouterArgsError as RouterArgsError
from omni_proxy.compat.start_router import RouterEnded as RouterEnded
from omni_proxy.compat.start_router import VllmRouter as VllmRouter
from omni_proxy.compat.start_router import launch_router as launch_router
from omni_proxy.compat.start_router import launch_vllm_router as launch_vllm_router
from omni_proxy.compat.vllm_router_args import VllmRouterArgs as VllmRouterArgs

RouterArgs = SglangRouterArgs
