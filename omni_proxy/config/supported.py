"""What this build does not do yet, as one table: key -> the values that it takes today.

A value that is not listed is refused, never ignored. A key that is not listed takes everything
that its type takes: building a feature ends with deleting its line here.
"""

from typing import Final

NOT_YET: Final[dict[str, tuple[object, ...]]] = {
    "server.processes": (1,),
    "server.tls_cert": ("",),
    "server.tls_key": ("",),
    "routing.voice_owner": ("",),
    "admin.listen": ("",),
    "admin.listen_key": (True,),
    "weight_sync.mode": ("off",),
    "weight_sync.backend": ("auto",),
    "weight_sync.isolation": ("process",),
    "weight_sync.init_timeout_secs": (1800,),
    "weight_sync.ready_timeout_secs": (60,),
    "weight_sync.receive_timeout_secs": (300,),
    "weight_sync.stall_timeout_secs": (30,),
    "weight_sync.store_dir": ("",),
    "weight_sync.keep_versions": (2,),
    "weight_sync.on_failure": ("quarantine",),
}
# Schemes of worker URLs, ruled by the same idea.
SCHEMES_NOT_YET: Final = ("https",)


def not_yet(key: str, value: object) -> str:
    """Why this value of a key (written without list indices) is refused, or ""."""
    if key == "workers.url":
        scheme = str(value).partition(":")[0]
        return f"{scheme} workers are not supported yet" if scheme in SCHEMES_NOT_YET else ""
    today = NOT_YET.get(key)
    asked = value if isinstance(value, list) else [value]
    if today is None or all(one in today for one in asked):
        return ""
    refused = next(one for one in asked if one not in today)
    return f"{toml(refused)} is not supported yet (today: {', '.join(map(toml, today))})"


def toml(value: object) -> str:
    """The value as one would write it in FILE."""
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)
