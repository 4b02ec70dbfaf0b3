"""Requirements of a body that is written as most are, found without decoding it.

Here for the native build, whose `usual_body.pyx` stands in the place of this file: to look through
a body by hand pays there alone. Invariant: `read_usual` returns what `requirements_of_fields` does
with the decoded body, or None for a body that must be decoded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from omni_proxy.routing.inspect.requirements import Requirements
    from omni_proxy.routing.routes import Route

READS_BODIES: Final = False


def read_usual(route: Route, body: bytes) -> Requirements | None:
    """Of a body of model traffic that is no speech."""
    return None
