"""The messages of Envoy's external processor, with the fields that the picker reads and writes.

Invariant: full names, numbers and types are those of the public protocol, since they are on the
wire; other fields are ignored as unknown. `protocol.pyi` has the types of the classes. There is no
logic here.

Source: external_processor.proto, base.proto, processing_mode.proto and http_status.proto of Envoy's
API, version 3. No package on PyPI has only these: xds-protos overwrites files of other packages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from omni_proxy.picker.ext_proc.message_classes import STRUCT, Field, message_class, message_pool

_CORE: Final = "envoy.config.core.v3"
_FILTER: Final = "envoy.extensions.filters.http.ext_proc.v3"
_HTTP: Final = "envoy.type.v3"
_SERVICE: Final = "envoy.service.ext_proc.v3"
_BODY_MODE: Final = f"{_FILTER}.ProcessingMode.BodySendMode"
_APPEND: Final = f"{_CORE}.HeaderValueOption.HeaderAppendAction"

ENUMS: Final[Mapping[str, Mapping[str, int]]] = {
    _APPEND: {
        "APPEND_IF_EXISTS_OR_ADD": 0,
        "ADD_IF_ABSENT": 1,
        "OVERWRITE_IF_EXISTS_OR_ADD": 2,
        "OVERWRITE_IF_EXISTS": 3,
    },
    _BODY_MODE: {
        "NONE": 0,
        "STREAMED": 1,
        "BUFFERED": 2,
        "BUFFERED_PARTIAL": 3,
        "FULL_DUPLEX_STREAMED": 4,
        "GRPC": 5,
    },
}


def _phases(first: int, oneof: str, *types: str) -> tuple[Field, ...]:
    """A field for each part of a request and its response, numbered from `first` on.

    `types`: message types of headers, bodies and trailers.
    """
    return tuple(
        Field(first + 2 * index + offset, f"{side}_{part}", f"{_SERVICE}.{name}", oneof=oneof)
        for index, (part, name) in enumerate(zip(_PHASES, types, strict=True))
        for offset, side in enumerate(("request", "response"))
    )


_PHASES: Final = ("headers", "body", "trailers")
_PARTS: Final[Mapping[str, Sequence[Field]]] = {
    f"{_CORE}.HeaderValue": (
        Field(1, "key", "string"),
        Field(2, "value", "string"),
        Field(3, "raw_value", "bytes"),
    ),
    f"{_CORE}.HeaderMap": (Field(1, "headers", f"{_CORE}.HeaderValue", "repeated"),),
    f"{_CORE}.HeaderValueOption": (
        Field(1, "header", f"{_CORE}.HeaderValue"),
        Field(3, "append_action", _APPEND),
    ),
    f"{_CORE}.Metadata": (Field(1, "filter_metadata", STRUCT, "map"),),
    f"{_FILTER}.ProcessingMode": (),  # only for its enum
    # An enum in the protocol; as int32 it has the same encoding and allows any number.
    f"{_HTTP}.HttpStatus": (Field(1, "code", "int32"),),
}

_REQUEST: Final[Mapping[str, Sequence[Field]]] = {
    f"{_SERVICE}.HttpHeaders": (
        Field(1, "headers", f"{_CORE}.HeaderMap"),
        Field(3, "end_of_stream", "bool"),
    ),
    f"{_SERVICE}.HttpBody": (Field(1, "body", "bytes"), Field(2, "end_of_stream", "bool")),
    f"{_SERVICE}.HttpTrailers": (Field(1, "trailers", f"{_CORE}.HeaderMap"),),
    f"{_SERVICE}.ProtocolConfiguration": (
        Field(1, "request_body_mode", _BODY_MODE),
        Field(2, "response_body_mode", _BODY_MODE),
    ),
    f"{_SERVICE}.ProcessingRequest": (
        *_phases(2, "request", "HttpHeaders", "HttpBody", "HttpTrailers"),
        Field(8, "metadata_context", f"{_CORE}.Metadata"),
        Field(11, "protocol_config", f"{_SERVICE}.ProtocolConfiguration"),
    ),
}

_RESPONSE: Final[Mapping[str, Sequence[Field]]] = {
    f"{_SERVICE}.HeaderMutation": (
        Field(1, "set_headers", f"{_CORE}.HeaderValueOption", "repeated"),
        Field(2, "remove_headers", "string", "repeated"),
    ),
    f"{_SERVICE}.StreamedBodyResponse": (
        Field(1, "body", "bytes"),
        Field(2, "end_of_stream", "bool"),
    ),
    f"{_SERVICE}.BodyMutation": (
        Field(1, "body", "bytes", oneof="mutation"),
        Field(3, "streamed_response", f"{_SERVICE}.StreamedBodyResponse", oneof="mutation"),
    ),
    f"{_SERVICE}.CommonResponse": (
        Field(2, "header_mutation", f"{_SERVICE}.HeaderMutation"),
        Field(3, "body_mutation", f"{_SERVICE}.BodyMutation"),
        Field(5, "clear_route_cache", "bool"),
    ),
    f"{_SERVICE}.HeadersResponse": (Field(1, "response", f"{_SERVICE}.CommonResponse"),),
    f"{_SERVICE}.BodyResponse": (Field(1, "response", f"{_SERVICE}.CommonResponse"),),
    f"{_SERVICE}.TrailersResponse": (Field(1, "header_mutation", f"{_SERVICE}.HeaderMutation"),),
    f"{_SERVICE}.ImmediateResponse": (
        Field(1, "status", f"{_HTTP}.HttpStatus"),
        Field(2, "headers", f"{_SERVICE}.HeaderMutation"),
        Field(3, "body", "bytes"),
        Field(5, "details", "string"),
    ),
    f"{_SERVICE}.ProcessingResponse": (
        *_phases(1, "response", "HeadersResponse", "BodyResponse", "TrailersResponse"),
        Field(7, "immediate_response", f"{_SERVICE}.ImmediateResponse", oneof="response"),
        Field(8, "dynamic_metadata", STRUCT),
    ),
}

MESSAGES: Final[Mapping[str, Sequence[Field]]] = {**_PARTS, **_REQUEST, **_RESPONSE}

_POOL: Final = message_pool(MESSAGES, ENUMS)

Struct = message_class(_POOL, STRUCT)
HeaderMap = message_class(_POOL, f"{_CORE}.HeaderMap")
HeaderValue = message_class(_POOL, f"{_CORE}.HeaderValue")
HeaderValueOption = message_class(_POOL, f"{_CORE}.HeaderValueOption")
Metadata = message_class(_POOL, f"{_CORE}.Metadata")
ProcessingMode = message_class(_POOL, f"{_FILTER}.ProcessingMode")
HttpStatus = message_class(_POOL, f"{_HTTP}.HttpStatus")
HttpHeaders = message_class(_POOL, f"{_SERVICE}.HttpHeaders")
HttpBody = message_class(_POOL, f"{_SERVICE}.HttpBody")
HttpTrailers = message_class(_POOL, f"{_SERVICE}.HttpTrailers")
ProtocolConfiguration = message_class(_POOL, f"{_SERVICE}.ProtocolConfiguration")
ProcessingRequest = message_class(_POOL, f"{_SERVICE}.ProcessingRequest")
HeaderMutation = message_class(_POOL, f"{_SERVICE}.HeaderMutation")
StreamedBodyResponse = message_class(_POOL, f"{_SERVICE}.StreamedBodyResponse")
BodyMutation = message_class(_POOL, f"{_SERVICE}.BodyMutation")
CommonResponse = message_class(_POOL, f"{_SERVICE}.CommonResponse")
HeadersResponse = message_class(_POOL, f"{_SERVICE}.HeadersResponse")
BodyResponse = message_class(_POOL, f"{_SERVICE}.BodyResponse")
TrailersResponse = message_class(_POOL, f"{_SERVICE}.TrailersResponse")
ImmediateResponse = message_class(_POOL, f"{_SERVICE}.ImmediateResponse")
ProcessingResponse = message_class(_POOL, f"{_SERVICE}.ProcessingResponse")
