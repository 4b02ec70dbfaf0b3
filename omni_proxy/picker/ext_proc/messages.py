"""Reads headers from messages of Envoy's external processor, and builds its responses. Pure.

Source: envoy/service/ext_proc/v3/external_processor.proto; for the names of the header and of the
metadata, the endpoint picker protocol of the Gateway API inference extension.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from omni_proxy.picker.ext_proc.protocol import (
    BodyMutation,
    BodyResponse,
    CommonResponse,
    HeaderMap,
    HeaderMutation,
    HeadersResponse,
    HeaderValue,
    HeaderValueOption,
    HttpStatus,
    ImmediateResponse,
    ProcessingRequest,
    ProcessingResponse,
    StreamedBodyResponse,
    Struct,
    TrailersResponse,
)
from omni_proxy.wire.errors import HttpError

DESTINATION: Final = "x-gateway-destination-endpoint"
DESTINATION_NAMESPACE: Final = "envoy.lb"
PREFILLER: Final = "x-prefiller-host-port"  # of llm-d, for the sidecar of a decode worker
SUBSET: Final = "x-gateway-destination-endpoint-subset"
SUBSET_NAMESPACE: Final = "envoy.lb.subset_hint"
CHUNK_BYTES: Final = 64_000  # chunk size of a body for Envoy, about its buffer size
# In a oneof, setting an empty message selects it.
_CONTINUE: Final = CommonResponse()


class Destination(msgspec.Struct, gc=False):
    """The target of a request: `endpoint` is `ip:port`.

    `headers` replace headers of the same names; `removed` ones are removed. `body`: None to keep
    the client's body. `added_headers`: added to the response.
    """

    endpoint: str
    headers: Mapping[str, str] = {}
    removed: Sequence[str] = ()
    body: bytes | None = None
    added_headers: Sequence[tuple[str, str]] = ()


def read_headers(headers: HeaderMap) -> dict[str, str]:
    """Headers by name. Names are in lower case, pseudo-headers begin with a colon, and values of
    repeated names are joined by a comma."""
    by_name: dict[str, str] = {}
    for header in headers.headers:
        value = header.raw_value.decode("latin-1") if header.raw_value else header.value
        name = header.key
        by_name[name] = f"{by_name[name]}, {value}" if name in by_name else value
    return by_name


def subset_of(message: ProcessingRequest) -> frozenset[str] | None:
    """The subset hint: endpoints (`ip:port`) that are allowed; None without a hint."""
    filters = message.metadata_context.filter_metadata
    if SUBSET_NAMESPACE not in filters:
        return None
    hint = filters[SUBSET_NAMESPACE].fields
    if SUBSET not in hint:
        return None
    value = hint[SUBSET]
    if value.WhichOneof("kind") == "list_value":
        texts: Iterable[str] = (item.string_value for item in value.list_value.values)
    else:
        texts = value.string_value.split(",")
    return frozenset(text.strip() for text in texts if text.strip())


def _option(name: str, value: str) -> HeaderValueOption:
    return HeaderValueOption(
        header=HeaderValue(key=name, raw_value=value.encode("latin-1", "replace")),
        append_action=HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD,
    )


def _common(destination: Destination, length: int | None) -> CommonResponse:
    headers = {DESTINATION: destination.endpoint, **destination.headers}
    if length is not None:
        headers["content-length"] = str(length)
    return CommonResponse(
        header_mutation=HeaderMutation(
            set_headers=[_option(*header) for header in headers.items()],
            remove_headers=destination.removed,
        ),
        clear_route_cache=True,
    )


def _metadata(destination: Destination) -> Struct:
    metadata = Struct()
    metadata.update({DESTINATION_NAMESPACE: {DESTINATION: destination.endpoint}})
    return metadata


def headers_to(destination: Destination, length: int | None = None) -> ProcessingResponse:
    """Continue with the request headers, to this destination.

    `length`: content-length of a body that is sent in chunks, for which Envoy drops the client's.
    """
    return ProcessingResponse(
        request_headers=HeadersResponse(response=_common(destination, length)),
        dynamic_metadata=_metadata(destination),
    )


def body_to(destination: Destination) -> ProcessingResponse:
    """Continue with headers and body, both of which Envoy has buffered, to this destination."""
    common = _common(destination, None if destination.body is None else len(destination.body))
    if destination.body is not None:
        common.body_mutation.CopyFrom(BodyMutation(body=destination.body))
    return ProcessingResponse(
        request_body=BodyResponse(response=common), dynamic_metadata=_metadata(destination)
    )


def request_headers() -> ProcessingResponse:
    return ProcessingResponse(request_headers=HeadersResponse(response=_CONTINUE))


def request_body() -> ProcessingResponse:
    return ProcessingResponse(request_body=BodyResponse(response=_CONTINUE))


def request_trailers() -> ProcessingResponse:
    return ProcessingResponse(request_trailers=TrailersResponse())


def response_headers(added: Sequence[tuple[str, str]] = ()) -> ProcessingResponse:
    if not added:
        return ProcessingResponse(response_headers=HeadersResponse(response=_CONTINUE))
    mutation = HeaderMutation(set_headers=[_option(*header) for header in added])
    return ProcessingResponse(
        response_headers=HeadersResponse(response=CommonResponse(header_mutation=mutation))
    )


def response_body() -> ProcessingResponse:
    return ProcessingResponse(response_body=BodyResponse(response=_CONTINUE))


def response_trailers() -> ProcessingResponse:
    return ProcessingResponse(response_trailers=TrailersResponse())


def _streamed(chunk: bytes, end: bool) -> BodyResponse:
    streamed = StreamedBodyResponse(body=chunk, end_of_stream=end)
    return BodyResponse(
        response=CommonResponse(body_mutation=BodyMutation(streamed_response=streamed))
    )


def request_chunks(body: bytes, *, end: bool) -> list[ProcessingResponse]:
    """A whole body in chunks; `end`: no trailers follow."""
    cuts = range(0, len(body), CHUNK_BYTES) or range(1)
    return [
        ProcessingResponse(
            request_body=_streamed(
                body[cut : cut + CHUNK_BYTES], end and cut + CHUNK_BYTES >= len(body)
            )
        )
        for cut in cuts
    ]


def response_chunk(chunk: bytes, *, end: bool) -> ProcessingResponse:
    return ProcessingResponse(response_body=_streamed(chunk, end))


def refusal(error: HttpError) -> ProcessingResponse:
    """An immediate response: Envoy sends the error to the client, and nothing to a worker."""
    headers = [("content-type", error.content_type), *error.headers]
    return ProcessingResponse(
        immediate_response=ImmediateResponse(
            status=HttpStatus(code=error.status),
            headers=HeaderMutation(set_headers=[_option(*header) for header in headers]),
            body=error.body(),
            details=f"omni_proxy_{error.code}",
        )
    )
