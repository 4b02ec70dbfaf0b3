"""Requirements of a body in the usual form, found without decoding it.

A stub for the native build, where `plain_body.pyx` replaces this file: only there is scanning a
body faster than decoding it. Invariant: `read_plain_body` returns what `requirements_of_fields`
returns for the decoded body, or None for a body that must be decoded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from omni_proxy.routing.inspect.requirements import Requirements
    from omni_proxy.routing.routes import Route

READS_BODIES: Final = False


def read_plain_body(route: Route, body: bytes) -> Requirements | None:
    """For bodies of model traffic other than speech."""
    return None
