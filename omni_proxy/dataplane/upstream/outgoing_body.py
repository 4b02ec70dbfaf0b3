"""The body that an attempt sends: the client's body, or a changed copy.

An alias with `rewrite` changes the model, and a data-parallel rank adds the key that names it if
the engine ignores the header. Invariant: without either the client's body is sent, and changes are
made by splicing. The legs of a request change the body further.
"""

from __future__ import annotations

from omni_proxy.dataplane.exchange.exchange import Exchange
from omni_proxy.routing.inspect.model_field import Parts, model_spans, with_model
from omni_proxy.routing.inspect.requirements import HeadFacts, Requirements
from omni_proxy.routing.model_aliases import ModelAliases
from omni_proxy.routing.pinning import body_for_rank
from omni_proxy.routing.routes import FORM, Route
from omni_proxy.routing.weighted_split import AliasRequirement


def changed_parts(exchange: Exchange) -> Parts | None:
    """The body for the current attempt, in parts that refer to the client's body; None if it is
    unchanged."""
    need, route, body, rank = (
        exchange.requirements, exchange.route, exchange.body, exchange.rank
    )  # fmt: skip
    if need is None or route is None or not body or exchange.legs is not None:
        return None  # in two legs `dataplane.disaggregation.two_leg_request` changes it
    parts = None
    if need.alias is not None and need.alias.spans:
        parts = parts_for_target(need, route, body)
    if rank is None:
        return parts
    return body_for_rank(route.path, need, rank, body if parts is None else b"".join(parts))


def parts_for_target(need: Requirements, route: Route, body: bytes) -> Parts:
    """`body` with the target's model, if `set_alias` has found a model in it."""
    alias, model = need.alias, need.target_model
    if alias is None or model is None or not alias.spans:
        return [body]
    return with_model(body, alias.spans, model, is_json=route.body_kind is not FORM)


def set_alias(
    aliases: ModelAliases, need: Requirements, route: Route, body: bytes, facts: HeadFacts
) -> None:
    """Set the alias that the request names; with `rewrite` also its positions in the body. Raises
    HttpError 400."""
    split = aliases.find(need.model)
    if split is None or need.alias is not None:
        return
    need.alias = AliasRequirement(split)
    if split.rewrite:
        fields = need.body_fields
        read = fields.model if fields is not None else None
        need.alias.spans = model_spans(route, body, facts, read)
