"""Builds classes of protobuf messages from tables of their fields.

Invariant: they are in a separate descriptor pool, so that another copy of the same messages in the
process neither collides with them nor changes them. Unknown fields of parsed messages are ignored.

Source: descriptor.proto and the proto3 language guide of protobuf.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from google.protobuf import struct_pb2
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
)
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

STRUCT: Final = "google.protobuf.Struct"
_STRUCT_FILE: Final = "google/protobuf/struct.proto"
_SCALARS: Final[Mapping[str, int]] = {
    "bool": FieldDescriptorProto.TYPE_BOOL,
    "bytes": FieldDescriptorProto.TYPE_BYTES,
    "int32": FieldDescriptorProto.TYPE_INT32,
    "string": FieldDescriptorProto.TYPE_STRING,
}


@dataclass(frozen=True, slots=True)
class Field:
    """A field. `type`: a scalar's name, or the full name of a message or enum.

    `count`: "map" has strings as keys. `oneof`: of the fields with this name at most one is set.
    """

    number: int
    name: str
    type: str
    count: Literal["one", "repeated", "map"] = "one"
    oneof: str = ""


def message_pool(
    messages: Mapping[str, Sequence[Field]], enums: Mapping[str, Mapping[str, int]]
) -> DescriptorPool:
    """A pool with these messages and enums, by full name.

    An enum has to be nested in a message, and its first number is 0. Raises TypeError if the tables
    are inconsistent.
    """
    pool = DescriptorPool()
    pool.AddSerializedFile(struct_pb2.DESCRIPTOR.serialized_pb)
    # One file for each package; a file may import all files before it.
    files: dict[str, FileDescriptorProto] = {}
    for full_name, fields in messages.items():
        package, _, name = full_name.rpartition(".")
        file = files.get(package)
        if file is None:
            imported = [_STRUCT_FILE, *(earlier.name for earlier in files.values())]
            file = files[package] = FileDescriptorProto(
                name=f"{package}.proto", package=package, syntax="proto3", dependency=imported
            )
        _describe(file.message_type.add(name=name), full_name, fields, enums)
    for file in files.values():
        pool.AddSerializedFile(file.SerializeToString())
    return pool


def message_class(pool: DescriptorPool, full_name: str) -> type:
    """Raises KeyError for a message that the pool does not have."""
    message_type: type = GetMessageClass(pool.FindMessageTypeByName(full_name))
    return message_type


def _describe(
    message: DescriptorProto,
    full_name: str,
    fields: Sequence[Field],
    enums: Mapping[str, Mapping[str, int]],
) -> None:
    for name in dict.fromkeys(field.oneof for field in fields if field.oneof):
        message.oneof_decl.add(name=name)
    oneofs = [oneof.name for oneof in message.oneof_decl]
    for field in fields:
        described = message.field.add(name=field.name, number=field.number)
        described.label = FieldDescriptorProto.LABEL_OPTIONAL
        _set_type(described, field.type, enums)
        if field.oneof:
            described.oneof_index = oneofs.index(field.oneof)
        if field.count != "one":
            described.label = FieldDescriptorProto.LABEL_REPEATED
        if field.count == "map":
            entry = _map_entry(message, field, enums)
            described.type = FieldDescriptorProto.TYPE_MESSAGE
            described.type_name = f".{full_name}.{entry.name}"
    for enum_name, values in enums.items():
        parent, _, name = enum_name.rpartition(".")
        if parent == full_name:
            _describe_enum(message.enum_type.add(name=name), values)


def _describe_enum(enum: EnumDescriptorProto, values: Mapping[str, int]) -> None:
    for name, number in values.items():
        enum.value.add(name=name, number=number)


def _map_entry(
    message: DescriptorProto, field: Field, enums: Mapping[str, Mapping[str, int]]
) -> DescriptorProto:
    """The entry message of a map: a map is a repeated message with a key and a value."""
    entry = message.nested_type.add(name=f"{field.name.title().replace('_', '')}Entry")
    entry.options.map_entry = True
    for number, name, type_name in ((1, "key", "string"), (2, "value", field.type)):
        described = entry.field.add(name=name, number=number)
        described.label = FieldDescriptorProto.LABEL_OPTIONAL
        _set_type(described, type_name, enums)
    return entry


def _set_type(
    described: FieldDescriptorProto, name: str, enums: Mapping[str, Mapping[str, int]]
) -> None:
    if name in _SCALARS:
        described.type = _SCALARS[name]
        return
    in_enums = name in enums
    described.type = (
        FieldDescriptorProto.TYPE_ENUM if in_enums else FieldDescriptorProto.TYPE_MESSAGE
    )
    described.type_name = f".{name}"
