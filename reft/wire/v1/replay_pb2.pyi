from reft.wire.v1 import daemon_pb2 as _daemon_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ReplayOrder(_message.Message):
    __slots__ = ("base", "version", "lane", "data_bytes", "sections")
    BASE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    DATA_BYTES_FIELD_NUMBER: _ClassVar[int]
    SECTIONS_FIELD_NUMBER: _ClassVar[int]
    base: _daemon_pb2.Version
    version: _daemon_pb2.Version
    lane: bytes
    data_bytes: int
    sections: _containers.RepeatedCompositeFieldContainer[ReplaySection]
    def __init__(self, base: _Optional[_Union[_daemon_pb2.Version, _Mapping]] = ..., version: _Optional[_Union[_daemon_pb2.Version, _Mapping]] = ..., lane: _Optional[bytes] = ..., data_bytes: _Optional[int] = ..., sections: _Optional[_Iterable[_Union[ReplaySection, _Mapping]]] = ...) -> None: ...

class ReplaySection(_message.Message):
    __slots__ = ("owner", "begin", "nbytes", "leaves", "inline_leaves", "inline_bytes", "digests", "chunk_bytes", "has_whole_chunks", "base_begin")
    OWNER_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    LEAVES_FIELD_NUMBER: _ClassVar[int]
    INLINE_LEAVES_FIELD_NUMBER: _ClassVar[int]
    INLINE_BYTES_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_BYTES_FIELD_NUMBER: _ClassVar[int]
    HAS_WHOLE_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    BASE_BEGIN_FIELD_NUMBER: _ClassVar[int]
    owner: int
    begin: int
    nbytes: int
    leaves: _containers.RepeatedCompositeFieldContainer[_daemon_pb2.LeafEntry]
    inline_leaves: _containers.RepeatedCompositeFieldContainer[_daemon_pb2.LeafEntry]
    inline_bytes: _containers.RepeatedScalarFieldContainer[bytes]
    digests: _containers.RepeatedScalarFieldContainer[int]
    chunk_bytes: int
    has_whole_chunks: bool
    base_begin: int
    def __init__(self, owner: _Optional[int] = ..., begin: _Optional[int] = ..., nbytes: _Optional[int] = ..., leaves: _Optional[_Iterable[_Union[_daemon_pb2.LeafEntry, _Mapping]]] = ..., inline_leaves: _Optional[_Iterable[_Union[_daemon_pb2.LeafEntry, _Mapping]]] = ..., inline_bytes: _Optional[_Iterable[bytes]] = ..., digests: _Optional[_Iterable[int]] = ..., chunk_bytes: _Optional[int] = ..., has_whole_chunks: bool = ..., base_begin: _Optional[int] = ...) -> None: ...
