"""The paths of engines' control routes, which the admin API has, too.

The proxy calls engines at these paths, and its own routes (`admin_route_table.py`), their
translation (`engine_dialects.py`) and the merge of responses (`results.py`) are found by them.
"""

from __future__ import annotations

from typing import Final

# SGLang
INIT: Final = "/init_weights_update_group"
PREPARE: Final = "/prepare_weights_update"
COMPLETE: Final = "/complete_weights_update"
DESTROY: Final = "/destroy_weights_update_group"
BEGIN: Final = "/begin_weight_update"
END: Final = "/end_weight_update"
FROM_DISK: Final = "/update_weights_from_disk"
FROM_DISTRIBUTED: Final = "/update_weights_from_distributed"
FROM_TENSOR: Final = "/update_weights_from_tensor"
UPDATE_VERSION: Final = "/update_weight_version"
PAUSE_GENERATION: Final = "/pause_generation"
CONTINUE_GENERATION: Final = "/continue_generation"
FLUSH_CACHE: Final = "/flush_cache"
WEIGHTS_CHECKER: Final = "/weights_checker"
WEIGHTS_BY_NAME: Final = "/get_weights_by_name"
MODEL_INFO: Final = "/model_info"
SERVER_INFO: Final = "/server_info"
ABORT_REQUEST: Final = "/abort_request"
LOAD_ADAPTER: Final = "/load_lora_adapter"
UNLOAD_ADAPTER: Final = "/unload_lora_adapter"

# The second path exists in older engines, too; /get_model_info needs no key.
MODEL_INFO_PATHS: Final = (MODEL_INFO, "/get_model_info")
SERVER_INFO_PATHS: Final = (SERVER_INFO, "/get_server_info")

# vLLM
PAUSE: Final = "/pause"
RESUME: Final = "/resume"
SLEEP: Final = "/sleep"
WAKE_UP: Final = "/wake_up"
IS_PAUSED: Final = "/is_paused"
IS_SLEEPING: Final = "/is_sleeping"
WORLD_SIZE: Final = "/get_world_size"
WEIGHT_INFO: Final = "/weight_info"
WEIGHT_CHECKER: Final = "/weight_checker"
TRANSFER_INIT: Final = "/init_weight_transfer_engine"
TRANSFER_SHUTDOWN: Final = "/shutdown_weight_transfer_engine"
START_UPDATE: Final = "/start_weight_update"
START_DRAFT_UPDATE: Final = "/start_draft_weight_update"
UPDATE_WEIGHTS: Final = "/update_weights"
FINISH_UPDATE: Final = "/finish_weight_update"
RPC_ALL: Final = "/collective_rpc"
RESET_PREFIX_CACHE: Final = "/reset_prefix_cache"
ABORT_REQUESTS: Final = "/abort_requests"
V1_LOAD_ADAPTER: Final = "/v1/load_lora_adapter"
V1_UNLOAD_ADAPTER: Final = "/v1/unload_lora_adapter"
