"""Which workers are uncertain, paused or disabled, and who paused and disabled them.

Invariant: without the admin key a client gets no names of callers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from msgspec.structs import replace
from quart import has_request_context

from omni_proxy.config.state import DisabledBy
from omni_proxy.runtime_config.config_store import ConfigStore
from omni_proxy.weight_sync.protocol.journal import PauseRecord
from omni_proxy.weight_sync.state_journal import StateJournal


class OperatorState(NamedTuple):
    """By worker URL. `uncertain`: why the worker's weights are not known."""

    uncertain: Mapping[str, str]
    pauses: Mapping[str, PauseRecord]
    disabled_by: Mapping[str, DisabledBy]


def operator_state(journal: StateJournal, config_store: ConfigStore) -> OperatorState:
    return OperatorState(journal.uncertain, journal.pauses(), config_store.state.disabled_by)


def visible_operator_state(
    journal: StateJournal, config_store: ConfigStore, presents_key: Callable[[], bool]
) -> OperatorState:
    """With the names of callers only if the current request may see them."""
    state = operator_state(journal, config_store)
    if not (state.pauses or state.disabled_by) or (has_request_context() and presents_key()):
        return state
    return state._replace(
        pauses={url: replace(pause, by="") for url, pause in state.pauses.items()},
        disabled_by={url: DisabledBy(at=record.at) for url, record in state.disabled_by.items()},
    )
