from collections.abc import Iterable, Mapping, MutableMapping, MutableSequence, Sequence
from typing import Final, Self

from omni_proxy.picker.ext_proc.message_classes import Field

ENUMS: Final[Mapping[str, Mapping[str, int]]]
MESSAGES: Final[Mapping[str, Sequence[Field]]]

class _Message:
    def CopyFrom(self, other: Self) -> None: ...
    def HasField(self, field_name: str) -> bool: ...
    def SerializeToString(self) -> bytes: ...
    def WhichOneof(self, oneof_group: str) -> str | None: ...
    @classmethod
    def FromString(cls, data: bytes) -> Self: ...

class _ListValue(_Message):
    values: MutableSequence[_Value]

class _Value(_Message):
    string_value: str
    list_value: _ListValue

class Struct(_Message):
    fields: MutableMapping[str, _Value]
    def __init__(self) -> None: ...
    def update(self, d: Mapping[str, object]) -> None: ...

class HeaderValue(_Message):
    key: str
    value: str
    raw_value: bytes
    def __init__(self, *, key: str = "", value: str = "", raw_value: bytes = b"") -> None: ...

class HeaderMap(_Message):
    headers: MutableSequence[HeaderValue]
    def __init__(self, *, headers: Iterable[HeaderValue] = ()) -> None: ...

class HeaderValueOption(_Message):
    OVERWRITE_IF_EXISTS_OR_ADD: Final = 2
    header: HeaderValue
    append_action: int
    def __init__(self, *, header: HeaderValue | None = None, append_action: int = 0) -> None: ...

class Metadata(_Message):
    filter_metadata: MutableMapping[str, Struct]

class ProcessingMode(_Message):
    NONE: Final = 0
    STREAMED: Final = 1
    BUFFERED: Final = 2
    BUFFERED_PARTIAL: Final = 3
    FULL_DUPLEX_STREAMED: Final = 4

class HttpStatus(_Message):
    code: int
    def __init__(self, *, code: int = 0) -> None: ...

class HttpHeaders(_Message):
    headers: HeaderMap
    end_of_stream: bool
    def __init__(
        self, *, headers: HeaderMap | None = None, end_of_stream: bool = False
    ) -> None: ...

class HttpBody(_Message):
    body: bytes
    end_of_stream: bool
    def __init__(self, *, body: bytes = b"", end_of_stream: bool = False) -> None: ...

class HttpTrailers(_Message):
    trailers: HeaderMap
    def __init__(self, *, trailers: HeaderMap | None = None) -> None: ...

class ProtocolConfiguration(_Message):
    request_body_mode: int
    response_body_mode: int
    def __init__(self, *, request_body_mode: int = 0, response_body_mode: int = 0) -> None: ...

class ProcessingRequest(_Message):
    request_headers: HttpHeaders
    response_headers: HttpHeaders
    request_body: HttpBody
    response_body: HttpBody
    request_trailers: HttpTrailers
    response_trailers: HttpTrailers
    metadata_context: Metadata
    protocol_config: ProtocolConfiguration
    def __init__(
        self,
        *,
        request_headers: HttpHeaders | None = None,
        response_headers: HttpHeaders | None = None,
        request_body: HttpBody | None = None,
        response_body: HttpBody | None = None,
        request_trailers: HttpTrailers | None = None,
        response_trailers: HttpTrailers | None = None,
        metadata_context: Metadata | None = None,
        protocol_config: ProtocolConfiguration | None = None,
    ) -> None: ...

class HeaderMutation(_Message):
    set_headers: MutableSequence[HeaderValueOption]
    remove_headers: MutableSequence[str]
    def __init__(
        self,
        *,
        set_headers: Iterable[HeaderValueOption] = (),
        remove_headers: Iterable[str] = (),
    ) -> None: ...

class StreamedBodyResponse(_Message):
    body: bytes
    end_of_stream: bool
    def __init__(self, *, body: bytes = b"", end_of_stream: bool = False) -> None: ...

class BodyMutation(_Message):
    body: bytes
    streamed_response: StreamedBodyResponse
    def __init__(
        self, *, body: bytes = b"", streamed_response: StreamedBodyResponse | None = None
    ) -> None: ...

class CommonResponse(_Message):
    header_mutation: HeaderMutation
    body_mutation: BodyMutation
    clear_route_cache: bool
    def __init__(
        self,
        *,
        header_mutation: HeaderMutation | None = None,
        body_mutation: BodyMutation | None = None,
        clear_route_cache: bool = False,
    ) -> None: ...

class HeadersResponse(_Message):
    response: CommonResponse
    def __init__(self, *, response: CommonResponse | None = None) -> None: ...

class BodyResponse(_Message):
    response: CommonResponse
    def __init__(self, *, response: CommonResponse | None = None) -> None: ...

class TrailersResponse(_Message):
    header_mutation: HeaderMutation
    def __init__(self, *, header_mutation: HeaderMutation | None = None) -> None: ...

class ImmediateResponse(_Message):
    status: HttpStatus
    headers: HeaderMutation
    body: bytes
    details: str
    def __init__(
        self,
        *,
        status: HttpStatus | None = None,
        headers: HeaderMutation | None = None,
        body: bytes = b"",
        details: str = "",
    ) -> None: ...

class ProcessingResponse(_Message):
    request_headers: HeadersResponse
    response_headers: HeadersResponse
    request_body: BodyResponse
    response_body: BodyResponse
    request_trailers: TrailersResponse
    response_trailers: TrailersResponse
    immediate_response: ImmediateResponse
    dynamic_metadata: Struct
    def __init__(
        self,
        *,
        request_headers: HeadersResponse | None = None,
        response_headers: HeadersResponse | None = None,
        request_body: BodyResponse | None = None,
        response_body: BodyResponse | None = None,
        request_trailers: TrailersResponse | None = None,
        response_trailers: TrailersResponse | None = None,
        immediate_response: ImmediateResponse | None = None,
        dynamic_metadata: Struct | None = None,
    ) -> None: ...
