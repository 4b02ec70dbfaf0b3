"""Why a worker is cordoned: it gets no new request until each reason has been lifted.

Invariant: the module that sets a reason lifts it. UPDATING and ROLLOUT_BATCH end with their
operation, or when the journal is read again; UNCERTAIN and PAUSED are in the journal. The names are
part of the API: `held_by`, metrics, the state that other processes and other proxies get.
"""

from __future__ import annotations

from typing import Final

# Weights.
UPDATING: Final = "updating"  # an operation changes them
# Beside UPDATING: sticky sessions move. Other workers serve, and a drain may take minutes.
ROLLOUT_BATCH: Final = "rollout"
CATCHING_UP: Final = "catching_up"  # it gets the version that the others have
UNPROVEN: Final = "unproven"  # its version is not read yet
UNCERTAIN: Final = "uncertain"  # nobody knows what it has after an operation that failed
PAUSED: Final = "paused"  # its engine was paused, by a trainer or an operation
CUT_OFF: Final = "cut_off"  # the store of the cluster is lost: another proxy may change them
# All else.
LAUNCH_CORDON: Final = "launch"  # the process that the proxy starts for it is not ready
ROLE_CORDON: Final = "role"  # its engine was not asked for its role yet
NOT_READY_CORDON: Final = "discovery"  # discovery finds it, and that its pod is not ready
LEAVING_CORDON: Final = "leaving"  # discovery no longer finds it: it ends its requests, no more

# With only these a worker is healthy: just its weights are in question.
WEIGHT_CORDONS: Final = frozenset(
    (UPDATING, ROLLOUT_BATCH, CATCHING_UP, UNPROVEN, UNCERTAIN, PAUSED, CUT_OFF)
)
CHANGING_CORDONS: Final = frozenset((UPDATING, ROLLOUT_BATCH, CATCHING_UP))  # right now
DISCOVERY_CORDONS: Final = frozenset((NOT_READY_CORDON, LEAVING_CORDON))
