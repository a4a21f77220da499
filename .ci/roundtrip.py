"""Imports every stub below reft.wire.v1, and converts each message to bytes and back.

All plain fields of a message are filled.
"""

import importlib
import pathlib

import google.protobuf
import grpc
from google.protobuf.descriptor import FieldDescriptor as Field
from google.protobuf.message import Message

import reft.wire.v1 as package

SAMPLES = {
    Field.CPPTYPE_STRING: "x",
    Field.CPPTYPE_BOOL: True,
    Field.CPPTYPE_DOUBLE: 0.5,
    Field.CPPTYPE_FLOAT: 0.5,
}
NESTED = (Field.CPPTYPE_MESSAGE, Field.CPPTYPE_ENUM)


def filled(kind: type[Message]) -> Message:
    message = kind()
    for field in kind.DESCRIPTOR.fields:
        if field.cpp_type in NESTED:
            continue
        value = b"x" if field.type == Field.TYPE_BYTES else SAMPLES.get(field.cpp_type, 7)
        if isinstance(getattr(message, field.name), (str, bytes, bool, int, float)):
            setattr(message, field.name, value)
        else:
            getattr(message, field.name).append(value)
    return message


count = 0
for path in sorted(pathlib.Path(package.__file__).parent.glob("*_pb2*.py")):
    module = importlib.import_module(f"reft.wire.v1.{path.stem}")
    for kind in list(vars(module).values()):
        if isinstance(kind, type) and issubclass(kind, Message):
            sent = filled(kind)
            assert kind.FromString(sent.SerializeToString()) == sent, kind
            count += 1
assert count, "no messages: run make stubs"
print(f"protobuf {google.protobuf.__version__}, grpcio {grpc.__version__}: {count} messages ok")
