"""JSON shape of a weight sync: `sync` in GET /weights/status (docs/http.md)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omni_proxy.weight_sync.protocol.session import SyncSession
from omni_proxy.weight_sync.protocol.states import SyncState
from omni_proxy.weight_sync.session.fan_out import GroupFanOut
from omni_proxy.weight_sync.session.member import Member


def session_status(
    session: SyncSession,
    members: Mapping[str, Member],
    fan_out: GroupFanOut | None,
    now: float,
    step_at: float,
) -> dict[str, Any]:
    """The state, the owner, and a row per member. `step_at`: when the present step began."""
    owner = session.owner if session.state is not SyncState.IDLE else None
    return {
        "state": session.state.value,
        "owner": owner.to_dict(now) if owner else None,
        "step_secs": round(now - step_at, 3) if owner else 0.0,
        "open": session.has_unpublished,
        "buckets": session.round.buckets,
        "members": [_member_row(session, members.get(name), fan_out, name)
                    for name in session.members] if owner else [],
        "last_cause": session.cause or None,
    }  # fmt: skip


def _member_row(
    session: SyncSession, member: Member | None, fan_out: GroupFanOut | None, name: str
) -> dict[str, Any]:
    ranks = session.members[name].ranks
    result = fan_out.results.get(name) if fan_out is not None else None
    answered = "done" if result and result.success else "failed" if result else "asked"
    progress = getattr(member, "status", None)
    return {
        "member": name,
        "rank_offset": ranks.offset,
        "ranks": ranks.ranks,
        "standing": session.member_statuses()[name],
        "progress": answered if fan_out is not None else "idle",
        **({"receive": progress()} if callable(progress) else {}),
    }
