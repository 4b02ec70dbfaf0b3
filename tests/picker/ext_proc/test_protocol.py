import ast
from pathlib import Path

import pytest

pytest.importorskip("google.protobuf", reason="the extra `picker` is not installed")

from google.protobuf import descriptor_pool

from omni_proxy.picker.ext_proc import protocol
from omni_proxy.picker.ext_proc.message_classes import STRUCT, Field, message_class, message_pool

REQUEST = bytes.fromhex(
    "1215"  # 2: request headers
    "0a11"  # 1: a map of headers
    "0a0f" "0a053a70617468" "1a062f76312f78c3"  # :path, with bytes that are not UTF-8
    "1801"  # 3: the end of the stream
    "5002"  # 10: a field that is not in the table
    "5a04" "0804" "1002"  # 11: the modes of the bodies
)  # fmt: skip


def types():
    """The field names of each class in protocol.pyi."""
    tree = ast.parse(Path(protocol.__file__).with_suffix(".pyi").read_text())
    return {
        node.name: [each.target.id for each in node.body if isinstance(each, ast.AnnAssign)]
        for node in tree.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    }


def test_the_pyi_file_matches_the_tables():
    described = {"Struct": ["fields"]}
    for full_name, fields in protocol.MESSAGES.items():
        described[full_name.rpartition(".")[2]] = [field.name for field in fields]
    for name, names in types().items():
        message_type = getattr(protocol, name)
        assert message_type.DESCRIPTOR.name == name
        constants = [each for each in names if each.isupper()]
        assert [each for each in names if each not in constants] == described.pop(name)
        assert all(isinstance(getattr(message_type, each), int) for each in constants)
    assert described == {}


def test_a_request_is_read_by_field_numbers_and_unknown_fields_are_ignored():
    message = protocol.ProcessingRequest.FromString(REQUEST)
    assert message.WhichOneof("request") == "request_headers"
    (header,) = message.request_headers.headers.headers
    assert (header.key, header.raw_value) == (":path", b"/v1/x\xc3")
    assert message.request_headers.end_of_stream
    modes = message.protocol_config
    assert modes.request_body_mode == protocol.ProcessingMode.FULL_DUPLEX_STREAMED
    assert modes.response_body_mode == protocol.ProcessingMode.BUFFERED


def test_an_unknown_mode_is_read_as_its_number():
    assert protocol.ProtocolConfiguration.FromString(b"\x08\x63").request_body_mode == 99


def test_a_response_is_written_by_field_numbers():
    response = protocol.ProcessingResponse(
        immediate_response=protocol.ImmediateResponse(
            status=protocol.HttpStatus(code=503), body=b"b", details="d"
        )
    )
    assert response.SerializeToString() == bytes.fromhex("3a0b0a0308f7031a01622a0164")


def test_setting_one_content_of_a_request_clears_the_other():
    message = protocol.ProcessingRequest(request_body=protocol.HttpBody(body=b"x"))
    message.response_body.body = b"y"
    assert message.WhichOneof("request") == "response_body"
    assert not message.HasField("request_body")


def test_the_messages_are_not_in_the_pool_of_the_process():
    for full_name in protocol.MESSAGES:
        with pytest.raises(KeyError):
            descriptor_pool.Default().FindMessageTypeByName(full_name)


def test_two_pools_can_describe_the_same_name_differently():
    tables = [{"a.M": (Field(1, "old", "string"),)}, {"a.M": (Field(1, "new", "bytes"),)}]
    one, other = (message_class(message_pool(each, {}), "a.M") for each in tables)
    assert other.FromString(one(old="x").SerializeToString()).new == b"x"


def test_a_map_has_string_keys():
    pool = message_pool({"a.M": (Field(1, "some_map", STRUCT, "map"),)}, {})
    message = message_class(pool, "a.M")()
    message.some_map["k"].update({"x": 1})
    assert message_class(pool, "a.M").FromString(message.SerializeToString()) == message


def test_an_unknown_type_is_an_error():
    with pytest.raises(TypeError):
        message_pool({"a.M": (Field(1, "x", "a.Missing"),)}, {})
