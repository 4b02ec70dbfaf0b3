"""Names, defaults and limits of an engine's HTTP API on which the proxy and the replica agree.

Pure. Invariant: a value here is part of a protocol with other programs, or both sides fail if they
differ. Must not have settings of only one of them.
"""

from __future__ import annotations

from typing import Final, Literal

# The value is another one after each start of a replica.
INSTANCE_HEADER: Final = "x-omni-instance"
DEFAULT_WEIGHT_GROUP: Final = "weight_update_group"  # of a trainer's requests without a name

# Transfer of KV caches between prefill and decode workers, with the names of SGLang and vLLM.
KvConnector = Literal["sglang", "nixl", "mooncake"]
DEFAULT_BOOTSTRAP_PORT: Final = 8998  # of SGLang, of vLLM and of Mooncake
BOOTSTRAP_ROOMS: Final = 2**63  # rooms are 0 to BOOTSTRAP_ROOMS - 1

# A speech session (WebSocket): its first message is the configuration.
SPEECH_CONFIG_SECS: Final = 10.0
SPEECH_CONFIG_BYTES: Final = 15_029_592  # 10 MiB of reference audio in base64, 1 MiB of the rest
SPEECH_MESSAGE_BYTES: Final = 128 * 1024  # of each later message
