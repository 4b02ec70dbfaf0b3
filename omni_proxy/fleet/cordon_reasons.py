"""Cordon reasons: while a worker has one, it gets no new requests.

Invariant: the module that sets a reason removes it. UPDATING and ROLLOUT_BATCH end with their
operation, or when the journal is read after a restart; UNCERTAIN and PAUSED are in the journal.
The names are part of the API: they appear in `held_by`, in metrics, and in the state that is sent
to other processes and other proxies.
"""

from __future__ import annotations

from typing import Final

# Reasons that concern the worker's weights.
UPDATING: Final = "updating"  # an operation is changing its weights
# Set together with UPDATING. Sticky sessions move to the other workers, which keep serving: a drain
# may take minutes.
ROLLOUT_BATCH: Final = "rollout"
CATCHING_UP: Final = "catching_up"  # the published version is being delivered to it
UNPROVEN: Final = "unproven"  # its weight version has not been read yet
UNCERTAIN: Final = "uncertain"  # its version is unknown after a failed operation
PAUSED: Final = "paused"  # its engine was paused, by a trainer or an operation
CUT_OFF: Final = "cut_off"  # the cluster store is unreachable: another proxy may change its weights
# Other reasons.
LAUNCH_CORDON: Final = "launch"  # the process that the proxy starts for it is not ready
ROLE_CORDON: Final = "role"  # the role of its engine has not been read yet
NOT_READY_CORDON: Final = "discovery"  # discovery reports that its pod is not ready
LEAVING_CORDON: Final = "leaving"  # discovery no longer lists it: it only finishes its requests

# A worker with only these reasons counts as healthy: only its weights are in question.
WEIGHT_CORDONS: Final = frozenset(
    (UPDATING, ROLLOUT_BATCH, CATCHING_UP, UNPROVEN, UNCERTAIN, PAUSED, CUT_OFF)
)
CHANGING_CORDONS: Final = frozenset((UPDATING, ROLLOUT_BATCH, CATCHING_UP))  # weights in transfer
DISCOVERY_CORDONS: Final = frozenset((NOT_READY_CORDON, LEAVING_CORDON))
