"""Messages of Envoy's external processor: heads read, responses made. Pure.

Source: envoy/service/ext_proc/v3/external_processor.proto; the endpoint picker protocol of the
Gateway API inference extension for the names of header and metadata.
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
PREFILLER: Final = "x-prefiller-host-port"  # of llm-d, to the proxy beside a decode worker
SUBSET: Final = "x-gateway-destination-endpoint-subset"
SUBSET_NAMESPACE: Final = "envoy.lb.subset_hint"
CHUNK_BYTES: Final = 64_000  # of a body that goes back to Envoy, which buffers by such sizes
# In a message whose content is one of several, `set` without a value makes it the content.
_CONTINUE: Final = CommonResponse()


class Destination(msgspec.Struct, gc=False):
    """Where a request goes: `endpoint` is `ip:port`. `headers` replace those of these names,
    `removed` ones are not sent on. `body`: None for the client's own. `answer_headers`: of the
    response."""

    endpoint: str
    headers: Mapping[str, str] = {}
    removed: Sequence[str] = ()
    body: bytes | None = None
    answer_headers: Sequence[tuple[str, str]] = ()


def read_headers(headers: HeaderMap) -> dict[str, str]:
    """Names are in lower case, and those of the request line begin with a colon. Of a name that
    comes twice the values are joined."""
    found: dict[str, str] = {}
    for header in headers.headers:
        value = header.raw_value.decode("latin-1") if header.raw_value else header.value
        name = header.key
        found[name] = f"{found[name]}, {value}" if name in found else value
    return found


def subset_of(message: ProcessingRequest) -> frozenset[str] | None:
    """The endpoints that it may go to, as `ip:port`; None without a hint."""
    filters = message.metadata_context.filter_metadata
    if SUBSET_NAMESPACE not in filters:
        return None
    hint = filters[SUBSET_NAMESPACE].fields
    if SUBSET not in hint:
        return None
    value = hint[SUBSET]
    if value.WhichOneof("kind") == "list_value":
        texts: Iterable[str] = (each.string_value for each in value.list_value.values)
    else:
        texts = value.string_value.split(",")
    return frozenset(text.strip() for text in texts if text.strip())


def _option(name: str, value: str) -> HeaderValueOption:
    return HeaderValueOption(
        header=HeaderValue(key=name, raw_value=value.encode("latin-1", "replace")),
        append_action=HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD,
    )


def _common(to: Destination, length: int | None) -> CommonResponse:
    headers = {DESTINATION: to.endpoint, **to.headers}
    if length is not None:
        headers["content-length"] = str(length)
    return CommonResponse(
        header_mutation=HeaderMutation(
            set_headers=[_option(*each) for each in headers.items()], remove_headers=to.removed
        ),
        clear_route_cache=True,
    )


def _metadata(to: Destination) -> Struct:
    metadata = Struct()
    metadata.update({DESTINATION_NAMESPACE: {DESTINATION: to.endpoint}})
    return metadata


def headers_to(to: Destination, length: int | None = None) -> ProcessingResponse:
    """The head of a request may go on, there. `length`: of a body that follows in parts, for which
    Envoy has dropped the client's content-length."""
    return ProcessingResponse(
        request_headers=HeadersResponse(response=_common(to, length)),
        dynamic_metadata=_metadata(to),
    )


def body_to(to: Destination) -> ProcessingResponse:
    """The same of head and body, where Envoy has kept both back."""
    common = _common(to, None if to.body is None else len(to.body))
    if to.body is not None:
        common.body_mutation.CopyFrom(BodyMutation(body=to.body))
    return ProcessingResponse(
        request_body=BodyResponse(response=common), dynamic_metadata=_metadata(to)
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
    mutation = HeaderMutation(set_headers=[_option(*each) for each in added])
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
    """A whole body, given back in parts; `end`: no trailers follow."""
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
    """Envoy answers the client with it, and sends nothing to a worker."""
    headers = [("content-type", error.content_type), *error.headers]
    return ProcessingResponse(
        immediate_response=ImmediateResponse(
            status=HttpStatus(code=error.status),
            headers=HeaderMutation(set_headers=[_option(*each) for each in headers]),
            body=error.body(),
            details=f"omni_proxy_{error.code}",
        )
    )
