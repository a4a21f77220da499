from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SlotState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EMPTY: _ClassVar[SlotState]
    WRITING: _ClassVar[SlotState]
    LANDED: _ClassVar[SlotState]
    SEALED: _ClassVar[SlotState]

class Signal(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    JOINING: _ClassVar[Signal]
    HEALTHY: _ClassVar[Signal]
    SNAP: _ClassVar[Signal]
    SUSPECT: _ClassVar[Signal]
    UNHEALTHY: _ClassVar[Signal]
    OFFLINE: _ClassVar[Signal]
    COMPLETED: _ClassVar[Signal]

class AgentPhase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TRAINING: _ClassVar[AgentPhase]
    STOPPING: _ClassVar[AgentPhase]
    FAILED: _ClassVar[AgentPhase]
    FINISHED: _ClassVar[AgentPhase]

class Place(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    UNREPLICATED: _ClassVar[Place]
    CELL: _ClassVar[Place]
    INLINE: _ClassVar[Place]
EMPTY: SlotState
WRITING: SlotState
LANDED: SlotState
SEALED: SlotState
JOINING: Signal
HEALTHY: Signal
SNAP: Signal
SUSPECT: Signal
UNHEALTHY: Signal
OFFLINE: Signal
COMPLETED: Signal
TRAINING: AgentPhase
STOPPING: AgentPhase
FAILED: AgentPhase
FINISHED: AgentPhase
UNREPLICATED: Place
CELL: Place
INLINE: Place

class Epoch(_message.Message):
    __slots__ = ("counter", "ident")
    COUNTER_FIELD_NUMBER: _ClassVar[int]
    IDENT_FIELD_NUMBER: _ClassVar[int]
    counter: int
    ident: bytes
    def __init__(self, counter: _Optional[int] = ..., ident: _Optional[bytes] = ...) -> None: ...

class Version(_message.Message):
    __slots__ = ("epoch", "step")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    epoch: Epoch
    step: int
    def __init__(self, epoch: _Optional[_Union[Epoch, _Mapping]] = ..., step: _Optional[int] = ...) -> None: ...

class Node(_message.Message):
    __slots__ = ("name", "id", "addresses", "ranks", "domain")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    DOMAIN_FIELD_NUMBER: _ClassVar[int]
    name: str
    id: str
    addresses: _containers.RepeatedScalarFieldContainer[str]
    ranks: _containers.RepeatedScalarFieldContainer[int]
    domain: str
    def __init__(self, name: _Optional[str] = ..., id: _Optional[str] = ..., addresses: _Optional[_Iterable[str]] = ..., ranks: _Optional[_Iterable[int]] = ..., domain: _Optional[str] = ...) -> None: ...

class Manifest(_message.Message):
    __slots__ = ("job", "named", "token", "world", "nodes", "script", "every", "launch", "protect", "tolerate", "chunk_bytes", "layout_of", "mismatched", "tables", "layouts", "packed_tables", "trained_s", "failures", "slots", "lineage", "choice", "job_mark", "earlier_tokens")
    JOB_FIELD_NUMBER: _ClassVar[int]
    NAMED_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    WORLD_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    SCRIPT_FIELD_NUMBER: _ClassVar[int]
    EVERY_FIELD_NUMBER: _ClassVar[int]
    LAUNCH_FIELD_NUMBER: _ClassVar[int]
    PROTECT_FIELD_NUMBER: _ClassVar[int]
    TOLERATE_FIELD_NUMBER: _ClassVar[int]
    CHUNK_BYTES_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_OF_FIELD_NUMBER: _ClassVar[int]
    MISMATCHED_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    LAYOUTS_FIELD_NUMBER: _ClassVar[int]
    PACKED_TABLES_FIELD_NUMBER: _ClassVar[int]
    TRAINED_S_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    JOB_MARK_FIELD_NUMBER: _ClassVar[int]
    EARLIER_TOKENS_FIELD_NUMBER: _ClassVar[int]
    job: str
    named: bool
    token: bytes
    world: int
    nodes: _containers.RepeatedCompositeFieldContainer[Node]
    script: str
    every: int
    launch: str
    protect: str
    tolerate: int
    chunk_bytes: int
    layout_of: _containers.RepeatedScalarFieldContainer[int]
    mismatched: _containers.RepeatedScalarFieldContainer[str]
    tables: _containers.RepeatedScalarFieldContainer[bytes]
    layouts: _containers.RepeatedCompositeFieldContainer[RankLayout]
    packed_tables: _containers.RepeatedScalarFieldContainer[bytes]
    trained_s: float
    failures: int
    slots: int
    lineage: str
    choice: str
    job_mark: bytes
    earlier_tokens: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, job: _Optional[str] = ..., named: bool = ..., token: _Optional[bytes] = ..., world: _Optional[int] = ..., nodes: _Optional[_Iterable[_Union[Node, _Mapping]]] = ..., script: _Optional[str] = ..., every: _Optional[int] = ..., launch: _Optional[str] = ..., protect: _Optional[str] = ..., tolerate: _Optional[int] = ..., chunk_bytes: _Optional[int] = ..., layout_of: _Optional[_Iterable[int]] = ..., mismatched: _Optional[_Iterable[str]] = ..., tables: _Optional[_Iterable[bytes]] = ..., layouts: _Optional[_Iterable[_Union[RankLayout, _Mapping]]] = ..., packed_tables: _Optional[_Iterable[bytes]] = ..., trained_s: _Optional[float] = ..., failures: _Optional[int] = ..., slots: _Optional[int] = ..., lineage: _Optional[str] = ..., choice: _Optional[str] = ..., job_mark: _Optional[bytes] = ..., earlier_tokens: _Optional[_Iterable[bytes]] = ...) -> None: ...

class RankLayout(_message.Message):
    __slots__ = ("table", "cuts", "digest")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    CUTS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    table: int
    cuts: _containers.RepeatedScalarFieldContainer[int]
    digest: bytes
    def __init__(self, table: _Optional[int] = ..., cuts: _Optional[_Iterable[int]] = ..., digest: _Optional[bytes] = ...) -> None: ...

class Decision(_message.Message):
    __slots__ = ("epoch", "base", "known", "guard")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    GUARD_FIELD_NUMBER: _ClassVar[int]
    epoch: Epoch
    base: Version
    known: _containers.RepeatedCompositeFieldContainer[Epoch]
    guard: Version
    def __init__(self, epoch: _Optional[_Union[Epoch, _Mapping]] = ..., base: _Optional[_Union[Version, _Mapping]] = ..., known: _Optional[_Iterable[_Union[Epoch, _Mapping]]] = ..., guard: _Optional[_Union[Version, _Mapping]] = ...) -> None: ...

class Pins(_message.Message):
    __slots__ = ("seq", "whole", "turn", "protected", "kept", "attempt", "protected_by", "persist", "exposed")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    PROTECTED_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PROTECTED_BY_FIELD_NUMBER: _ClassVar[int]
    PERSIST_FIELD_NUMBER: _ClassVar[int]
    EXPOSED_FIELD_NUMBER: _ClassVar[int]
    seq: int
    whole: int
    turn: int
    protected: int
    kept: int
    attempt: int
    protected_by: int
    persist: int
    exposed: bool
    def __init__(self, seq: _Optional[int] = ..., whole: _Optional[int] = ..., turn: _Optional[int] = ..., protected: _Optional[int] = ..., kept: _Optional[int] = ..., attempt: _Optional[int] = ..., protected_by: _Optional[int] = ..., persist: _Optional[int] = ..., exposed: bool = ...) -> None: ...

class GuardReport(_message.Message):
    __slots__ = ("lanes", "attempt")
    LANES_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    lanes: _containers.RepeatedCompositeFieldContainer[UnguardedLane]
    attempt: int
    def __init__(self, lanes: _Optional[_Iterable[_Union[UnguardedLane, _Mapping]]] = ..., attempt: _Optional[int] = ...) -> None: ...

class UnguardedLane(_message.Message):
    __slots__ = ("step", "lane", "words", "attempt")
    STEP_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    WORDS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    step: int
    lane: int
    words: str
    attempt: int
    def __init__(self, step: _Optional[int] = ..., lane: _Optional[int] = ..., words: _Optional[str] = ..., attempt: _Optional[int] = ...) -> None: ...

class HelloRequest(_message.Message):
    __slots__ = ("protocol", "oldest", "job", "agent_pid", "launch")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    OLDEST_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    AGENT_PID_FIELD_NUMBER: _ClassVar[int]
    LAUNCH_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    oldest: int
    job: str
    agent_pid: int
    launch: str
    def __init__(self, protocol: _Optional[int] = ..., oldest: _Optional[int] = ..., job: _Optional[str] = ..., agent_pid: _Optional[int] = ..., launch: _Optional[str] = ...) -> None: ...

class HelloReply(_message.Message):
    __slots__ = ("protocol", "node", "node_id", "addresses", "version", "pid", "domain", "held", "local_socket", "tls", "unattended", "oldest", "persists", "job_token")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    DOMAIN_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    LOCAL_SOCKET_FIELD_NUMBER: _ClassVar[int]
    TLS_FIELD_NUMBER: _ClassVar[int]
    UNATTENDED_FIELD_NUMBER: _ClassVar[int]
    OLDEST_FIELD_NUMBER: _ClassVar[int]
    PERSISTS_FIELD_NUMBER: _ClassVar[int]
    JOB_TOKEN_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    node: str
    node_id: str
    addresses: _containers.RepeatedScalarFieldContainer[str]
    version: str
    pid: int
    domain: str
    held: bool
    local_socket: str
    tls: bool
    unattended: bool
    oldest: int
    persists: bool
    job_token: bytes
    def __init__(self, protocol: _Optional[int] = ..., node: _Optional[str] = ..., node_id: _Optional[str] = ..., addresses: _Optional[_Iterable[str]] = ..., version: _Optional[str] = ..., pid: _Optional[int] = ..., domain: _Optional[str] = ..., held: bool = ..., local_socket: _Optional[str] = ..., tls: bool = ..., unattended: bool = ..., oldest: _Optional[int] = ..., persists: bool = ..., job_token: _Optional[bytes] = ...) -> None: ...

class InventoryRequest(_message.Message):
    __slots__ = ("job", "launch", "pids", "end_orphans", "known")
    JOB_FIELD_NUMBER: _ClassVar[int]
    LAUNCH_FIELD_NUMBER: _ClassVar[int]
    PIDS_FIELD_NUMBER: _ClassVar[int]
    END_ORPHANS_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    job: str
    launch: str
    pids: _containers.RepeatedScalarFieldContainer[int]
    end_orphans: bool
    known: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, job: _Optional[str] = ..., launch: _Optional[str] = ..., pids: _Optional[_Iterable[int]] = ..., end_orphans: bool = ..., known: _Optional[_Iterable[int]] = ...) -> None: ...

class SlotHeader(_message.Message):
    __slots__ = ("rank", "slot", "state", "version", "layout", "age_s", "data_bytes", "parity", "stored")
    RANK_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    DATA_BYTES_FIELD_NUMBER: _ClassVar[int]
    PARITY_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    rank: int
    slot: str
    state: SlotState
    version: Version
    layout: bytes
    age_s: float
    data_bytes: int
    parity: bool
    stored: bool
    def __init__(self, rank: _Optional[int] = ..., slot: _Optional[str] = ..., state: _Optional[_Union[SlotState, str]] = ..., version: _Optional[_Union[Version, _Mapping]] = ..., layout: _Optional[bytes] = ..., age_s: _Optional[float] = ..., data_bytes: _Optional[int] = ..., parity: bool = ..., stored: bool = ...) -> None: ...

class CapsuleHeader(_message.Message):
    __slots__ = ("rank", "version", "unreplicated_bytes")
    RANK_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    UNREPLICATED_BYTES_FIELD_NUMBER: _ClassVar[int]
    rank: int
    version: Version
    unreplicated_bytes: int
    def __init__(self, rank: _Optional[int] = ..., version: _Optional[_Union[Version, _Mapping]] = ..., unreplicated_bytes: _Optional[int] = ...) -> None: ...

class OtherJob(_message.Message):
    __slots__ = ("job", "named", "script", "newest", "age_s")
    JOB_FIELD_NUMBER: _ClassVar[int]
    NAMED_FIELD_NUMBER: _ClassVar[int]
    SCRIPT_FIELD_NUMBER: _ClassVar[int]
    NEWEST_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    job: str
    named: bool
    script: str
    newest: Version
    age_s: float
    def __init__(self, job: _Optional[str] = ..., named: bool = ..., script: _Optional[str] = ..., newest: _Optional[_Union[Version, _Mapping]] = ..., age_s: _Optional[float] = ...) -> None: ...

class InventoryReply(_message.Message):
    __slots__ = ("manifest", "decision", "slots", "had_whole", "others", "base_manifest", "capsules", "node", "node_id", "trained_s", "failed", "troubles", "restores", "reached", "known", "guard_manifest", "records", "not_recomputed", "room_bytes")
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    DECISION_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    HAD_WHOLE_FIELD_NUMBER: _ClassVar[int]
    OTHERS_FIELD_NUMBER: _ClassVar[int]
    BASE_MANIFEST_FIELD_NUMBER: _ClassVar[int]
    CAPSULES_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    TRAINED_S_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    TROUBLES_FIELD_NUMBER: _ClassVar[int]
    RESTORES_FIELD_NUMBER: _ClassVar[int]
    REACHED_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    GUARD_MANIFEST_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    NOT_RECOMPUTED_FIELD_NUMBER: _ClassVar[int]
    ROOM_BYTES_FIELD_NUMBER: _ClassVar[int]
    manifest: Manifest
    decision: Decision
    slots: _containers.RepeatedCompositeFieldContainer[SlotHeader]
    had_whole: bool
    others: _containers.RepeatedCompositeFieldContainer[OtherJob]
    base_manifest: Manifest
    capsules: _containers.RepeatedCompositeFieldContainer[CapsuleHeader]
    node: str
    node_id: str
    trained_s: float
    failed: bool
    troubles: _containers.RepeatedScalarFieldContainer[str]
    restores: RestoreCount
    reached: int
    known: _containers.RepeatedCompositeFieldContainer[KnownStep]
    guard_manifest: Manifest
    records: _containers.RepeatedCompositeFieldContainer[SlotHeader]
    not_recomputed: str
    room_bytes: int
    def __init__(self, manifest: _Optional[_Union[Manifest, _Mapping]] = ..., decision: _Optional[_Union[Decision, _Mapping]] = ..., slots: _Optional[_Iterable[_Union[SlotHeader, _Mapping]]] = ..., had_whole: bool = ..., others: _Optional[_Iterable[_Union[OtherJob, _Mapping]]] = ..., base_manifest: _Optional[_Union[Manifest, _Mapping]] = ..., capsules: _Optional[_Iterable[_Union[CapsuleHeader, _Mapping]]] = ..., node: _Optional[str] = ..., node_id: _Optional[str] = ..., trained_s: _Optional[float] = ..., failed: bool = ..., troubles: _Optional[_Iterable[str]] = ..., restores: _Optional[_Union[RestoreCount, _Mapping]] = ..., reached: _Optional[int] = ..., known: _Optional[_Iterable[_Union[KnownStep, _Mapping]]] = ..., guard_manifest: _Optional[_Union[Manifest, _Mapping]] = ..., records: _Optional[_Iterable[_Union[SlotHeader, _Mapping]]] = ..., not_recomputed: _Optional[str] = ..., room_bytes: _Optional[int] = ...) -> None: ...

class KnownStep(_message.Message):
    __slots__ = ("step", "source")
    STEP_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    step: int
    source: str
    def __init__(self, step: _Optional[int] = ..., source: _Optional[str] = ...) -> None: ...

class RestoreCount(_message.Message):
    __slots__ = ("step", "count")
    STEP_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    step: int
    count: int
    def __init__(self, step: _Optional[int] = ..., count: _Optional[int] = ...) -> None: ...

class SurveyRequest(_message.Message):
    __slots__ = ("job", "nodes", "launch", "end_orphans", "round", "again", "tokens")
    JOB_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    LAUNCH_FIELD_NUMBER: _ClassVar[int]
    END_ORPHANS_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    AGAIN_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    job: str
    nodes: _containers.RepeatedCompositeFieldContainer[Node]
    launch: str
    end_orphans: bool
    round: int
    again: bool
    tokens: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, job: _Optional[str] = ..., nodes: _Optional[_Iterable[_Union[Node, _Mapping]]] = ..., launch: _Optional[str] = ..., end_orphans: bool = ..., round: _Optional[int] = ..., again: bool = ..., tokens: _Optional[_Iterable[bytes]] = ...) -> None: ...

class SurveyedNode(_message.Message):
    __slots__ = ("node", "reply", "trouble", "brief")
    NODE_FIELD_NUMBER: _ClassVar[int]
    REPLY_FIELD_NUMBER: _ClassVar[int]
    TROUBLE_FIELD_NUMBER: _ClassVar[int]
    BRIEF_FIELD_NUMBER: _ClassVar[int]
    node: Node
    reply: InventoryReply
    trouble: str
    brief: bool
    def __init__(self, node: _Optional[_Union[Node, _Mapping]] = ..., reply: _Optional[_Union[InventoryReply, _Mapping]] = ..., trouble: _Optional[str] = ..., brief: bool = ...) -> None: ...

class SurveyReply(_message.Message):
    __slots__ = ("nodes",)
    NODES_FIELD_NUMBER: _ClassVar[int]
    nodes: _containers.RepeatedCompositeFieldContainer[SurveyedNode]
    def __init__(self, nodes: _Optional[_Iterable[_Union[SurveyedNode, _Mapping]]] = ...) -> None: ...

class StoredRequest(_message.Message):
    __slots__ = ("job", "lineage", "name")
    JOB_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    job: str
    lineage: str
    name: str
    def __init__(self, job: _Optional[str] = ..., lineage: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class StoredCheckpoint(_message.Message):
    __slots__ = ("name", "version", "age_s")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    name: str
    version: Version
    age_s: float
    def __init__(self, name: _Optional[str] = ..., version: _Optional[_Union[Version, _Mapping]] = ..., age_s: _Optional[float] = ...) -> None: ...

class StoredLineage(_message.Message):
    __slots__ = ("ident", "has_ended", "decisions", "checkpoints")
    IDENT_FIELD_NUMBER: _ClassVar[int]
    HAS_ENDED_FIELD_NUMBER: _ClassVar[int]
    DECISIONS_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    ident: str
    has_ended: bool
    decisions: _containers.RepeatedCompositeFieldContainer[Decision]
    checkpoints: _containers.RepeatedCompositeFieldContainer[StoredCheckpoint]
    def __init__(self, ident: _Optional[str] = ..., has_ended: bool = ..., decisions: _Optional[_Iterable[_Union[Decision, _Mapping]]] = ..., checkpoints: _Optional[_Iterable[_Union[StoredCheckpoint, _Mapping]]] = ...) -> None: ...

class StoredReply(_message.Message):
    __slots__ = ("lineages", "directory", "manifest", "ranks", "damage", "trouble")
    LINEAGES_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    DAMAGE_FIELD_NUMBER: _ClassVar[int]
    TROUBLE_FIELD_NUMBER: _ClassVar[int]
    lineages: _containers.RepeatedCompositeFieldContainer[StoredLineage]
    directory: str
    manifest: Manifest
    ranks: _containers.RepeatedScalarFieldContainer[int]
    damage: str
    trouble: str
    def __init__(self, lineages: _Optional[_Iterable[_Union[StoredLineage, _Mapping]]] = ..., directory: _Optional[str] = ..., manifest: _Optional[_Union[Manifest, _Mapping]] = ..., ranks: _Optional[_Iterable[int]] = ..., damage: _Optional[str] = ..., trouble: _Optional[str] = ...) -> None: ...

class OpenStoredRequest(_message.Message):
    __slots__ = ("job", "lineage", "name", "version", "ranks", "asks_again")
    JOB_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    ASKS_AGAIN_FIELD_NUMBER: _ClassVar[int]
    job: str
    lineage: str
    name: str
    version: Version
    ranks: _containers.RepeatedScalarFieldContainer[int]
    asks_again: bool
    def __init__(self, job: _Optional[str] = ..., lineage: _Optional[str] = ..., name: _Optional[str] = ..., version: _Optional[_Union[Version, _Mapping]] = ..., ranks: _Optional[_Iterable[int]] = ..., asks_again: bool = ...) -> None: ...

class OpenStoredReply(_message.Message):
    __slots__ = ("damage", "opening", "fetched_bytes")
    DAMAGE_FIELD_NUMBER: _ClassVar[int]
    OPENING_FIELD_NUMBER: _ClassVar[int]
    FETCHED_BYTES_FIELD_NUMBER: _ClassVar[int]
    damage: str
    opening: bool
    fetched_bytes: int
    def __init__(self, damage: _Optional[str] = ..., opening: bool = ..., fetched_bytes: _Optional[int] = ...) -> None: ...

class DecideRequest(_message.Message):
    __slots__ = ("manifest", "decision", "node_index", "dropped", "base_manifest", "trainers", "guard_manifest", "goes_back", "node", "counts_on_slots")
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    DECISION_FIELD_NUMBER: _ClassVar[int]
    NODE_INDEX_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    BASE_MANIFEST_FIELD_NUMBER: _ClassVar[int]
    TRAINERS_FIELD_NUMBER: _ClassVar[int]
    GUARD_MANIFEST_FIELD_NUMBER: _ClassVar[int]
    GOES_BACK_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    COUNTS_ON_SLOTS_FIELD_NUMBER: _ClassVar[int]
    manifest: Manifest
    decision: Decision
    node_index: int
    dropped: _containers.RepeatedScalarFieldContainer[str]
    base_manifest: Manifest
    trainers: _containers.RepeatedScalarFieldContainer[int]
    guard_manifest: Manifest
    goes_back: bool
    node: Node
    counts_on_slots: bool
    def __init__(self, manifest: _Optional[_Union[Manifest, _Mapping]] = ..., decision: _Optional[_Union[Decision, _Mapping]] = ..., node_index: _Optional[int] = ..., dropped: _Optional[_Iterable[str]] = ..., base_manifest: _Optional[_Union[Manifest, _Mapping]] = ..., trainers: _Optional[_Iterable[int]] = ..., guard_manifest: _Optional[_Union[Manifest, _Mapping]] = ..., goes_back: bool = ..., node: _Optional[_Union[Node, _Mapping]] = ..., counts_on_slots: bool = ...) -> None: ...

class DecideReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StoreDecisionRequest(_message.Message):
    __slots__ = ("job", "lineage", "decision")
    JOB_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    DECISION_FIELD_NUMBER: _ClassVar[int]
    job: str
    lineage: str
    decision: Decision
    def __init__(self, job: _Optional[str] = ..., lineage: _Optional[str] = ..., decision: _Optional[_Union[Decision, _Mapping]] = ...) -> None: ...

class StoreDecisionReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PinRequest(_message.Message):
    __slots__ = ("job", "epoch", "undo")
    JOB_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    UNDO_FIELD_NUMBER: _ClassVar[int]
    job: str
    epoch: Epoch
    undo: bool
    def __init__(self, job: _Optional[str] = ..., epoch: _Optional[_Union[Epoch, _Mapping]] = ..., undo: bool = ...) -> None: ...

class PinReply(_message.Message):
    __slots__ = ("whole",)
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    whole: int
    def __init__(self, whole: _Optional[int] = ...) -> None: ...

class LeaseRequest(_message.Message):
    __slots__ = ("job", "epoch", "rank", "under_agent", "slots", "data_bytes", "table_bytes", "chunk_bytes", "cpus", "records", "record_bytes")
    JOB_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    UNDER_AGENT_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    DATA_BYTES_FIELD_NUMBER: _ClassVar[int]
    TABLE_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHUNK_BYTES_FIELD_NUMBER: _ClassVar[int]
    CPUS_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    RECORD_BYTES_FIELD_NUMBER: _ClassVar[int]
    job: str
    epoch: Epoch
    rank: int
    under_agent: bool
    slots: int
    data_bytes: int
    table_bytes: int
    chunk_bytes: int
    cpus: _containers.RepeatedScalarFieldContainer[int]
    records: int
    record_bytes: int
    def __init__(self, job: _Optional[str] = ..., epoch: _Optional[_Union[Epoch, _Mapping]] = ..., rank: _Optional[int] = ..., under_agent: bool = ..., slots: _Optional[int] = ..., data_bytes: _Optional[int] = ..., table_bytes: _Optional[int] = ..., chunk_bytes: _Optional[int] = ..., cpus: _Optional[_Iterable[int]] = ..., records: _Optional[int] = ..., record_bytes: _Optional[int] = ...) -> None: ...

class LeasedSlot(_message.Message):
    __slots__ = ("name", "file_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FILE_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    file_bytes: int
    def __init__(self, name: _Optional[str] = ..., file_bytes: _Optional[int] = ...) -> None: ...

class LeaseReply(_message.Message):
    __slots__ = ("slots", "backing", "note")
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    BACKING_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    slots: _containers.RepeatedCompositeFieldContainer[LeasedSlot]
    backing: str
    note: str
    def __init__(self, slots: _Optional[_Iterable[_Union[LeasedSlot, _Mapping]]] = ..., backing: _Optional[str] = ..., note: _Optional[str] = ...) -> None: ...

class CellDigest(_message.Message):
    __slots__ = ("cell", "digest")
    CELL_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    cell: int
    digest: int
    def __init__(self, cell: _Optional[int] = ..., digest: _Optional[int] = ...) -> None: ...

class SealedStep(_message.Message):
    __slots__ = ("step", "cells")
    STEP_FIELD_NUMBER: _ClassVar[int]
    CELLS_FIELD_NUMBER: _ClassVar[int]
    step: int
    cells: _containers.RepeatedCompositeFieldContainer[CellDigest]
    def __init__(self, step: _Optional[int] = ..., cells: _Optional[_Iterable[_Union[CellDigest, _Mapping]]] = ...) -> None: ...

class StepReport(_message.Message):
    __slots__ = ("since", "until", "sealed", "pending")
    SINCE_FIELD_NUMBER: _ClassVar[int]
    UNTIL_FIELD_NUMBER: _ClassVar[int]
    SEALED_FIELD_NUMBER: _ClassVar[int]
    PENDING_FIELD_NUMBER: _ClassVar[int]
    since: int
    until: int
    sealed: _containers.RepeatedCompositeFieldContainer[SealedStep]
    pending: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, since: _Optional[int] = ..., until: _Optional[int] = ..., sealed: _Optional[_Iterable[_Union[SealedStep, _Mapping]]] = ..., pending: _Optional[_Iterable[int]] = ...) -> None: ...

class LayoutReport(_message.Message):
    __slots__ = ("wanted", "joined", "ready")
    WANTED_FIELD_NUMBER: _ClassVar[int]
    JOINED_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    wanted: int
    joined: int
    ready: int
    def __init__(self, wanted: _Optional[int] = ..., joined: _Optional[int] = ..., ready: _Optional[int] = ...) -> None: ...

class LayoutOutcome(_message.Message):
    __slots__ = ("wanted", "joined", "start")
    WANTED_FIELD_NUMBER: _ClassVar[int]
    JOINED_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    wanted: int
    joined: int
    start: int
    def __init__(self, wanted: _Optional[int] = ..., joined: _Optional[int] = ..., start: _Optional[int] = ...) -> None: ...

class ReportRequest(_message.Message):
    __slots__ = ("job", "epoch", "rank", "steps", "wait_ms", "trouble", "requested_every", "layout")
    JOB_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    TROUBLE_FIELD_NUMBER: _ClassVar[int]
    REQUESTED_EVERY_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    job: str
    epoch: Epoch
    rank: int
    steps: StepReport
    wait_ms: int
    trouble: str
    requested_every: int
    layout: LayoutReport
    def __init__(self, job: _Optional[str] = ..., epoch: _Optional[_Union[Epoch, _Mapping]] = ..., rank: _Optional[int] = ..., steps: _Optional[_Union[StepReport, _Mapping]] = ..., wait_ms: _Optional[int] = ..., trouble: _Optional[str] = ..., requested_every: _Optional[int] = ..., layout: _Optional[_Union[LayoutReport, _Mapping]] = ...) -> None: ...

class ReportReply(_message.Message):
    __slots__ = ("until", "open", "slots_missing", "mismatched", "every", "interval_start", "layout", "pins", "records_over")
    UNTIL_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    SLOTS_MISSING_FIELD_NUMBER: _ClassVar[int]
    MISMATCHED_FIELD_NUMBER: _ClassVar[int]
    EVERY_FIELD_NUMBER: _ClassVar[int]
    INTERVAL_START_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    PINS_FIELD_NUMBER: _ClassVar[int]
    RECORDS_OVER_FIELD_NUMBER: _ClassVar[int]
    until: int
    open: _containers.RepeatedScalarFieldContainer[int]
    slots_missing: bool
    mismatched: _containers.RepeatedScalarFieldContainer[int]
    every: int
    interval_start: int
    layout: LayoutOutcome
    pins: Pins
    records_over: bool
    def __init__(self, until: _Optional[int] = ..., open: _Optional[_Iterable[int]] = ..., slots_missing: bool = ..., mismatched: _Optional[_Iterable[int]] = ..., every: _Optional[int] = ..., interval_start: _Optional[int] = ..., layout: _Optional[_Union[LayoutOutcome, _Mapping]] = ..., pins: _Optional[_Union[Pins, _Mapping]] = ..., records_over: bool = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("job", "epoch", "rank", "refused", "failed")
    JOB_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    job: str
    epoch: Epoch
    rank: int
    refused: bool
    failed: bool
    def __init__(self, job: _Optional[str] = ..., epoch: _Optional[_Union[Epoch, _Mapping]] = ..., rank: _Optional[int] = ..., refused: bool = ..., failed: bool = ...) -> None: ...

class ReleaseReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReadRequest(_message.Message):
    __slots__ = ("job", "slot", "version", "offset", "size", "checked", "node", "tokens")
    JOB_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    CHECKED_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    job: str
    slot: str
    version: Version
    offset: int
    size: int
    checked: bool
    node: Node
    tokens: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, job: _Optional[str] = ..., slot: _Optional[str] = ..., version: _Optional[_Union[Version, _Mapping]] = ..., offset: _Optional[int] = ..., size: _Optional[int] = ..., checked: bool = ..., node: _Optional[_Union[Node, _Mapping]] = ..., tokens: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...

class CapsuleRecord(_message.Message):
    __slots__ = ("rank", "version", "unreplicated_bytes", "capsule", "digests", "capsule_digest")
    RANK_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    UNREPLICATED_BYTES_FIELD_NUMBER: _ClassVar[int]
    CAPSULE_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    CAPSULE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    rank: int
    version: Version
    unreplicated_bytes: int
    capsule: bytes
    digests: bytes
    capsule_digest: int
    def __init__(self, rank: _Optional[int] = ..., version: _Optional[_Union[Version, _Mapping]] = ..., unreplicated_bytes: _Optional[int] = ..., capsule: _Optional[bytes] = ..., digests: _Optional[bytes] = ..., capsule_digest: _Optional[int] = ...) -> None: ...

class CapsuleRequest(_message.Message):
    __slots__ = ("job", "rank", "version", "node", "tokens")
    JOB_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    job: str
    rank: int
    version: Version
    node: Node
    tokens: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, job: _Optional[str] = ..., rank: _Optional[int] = ..., version: _Optional[_Union[Version, _Mapping]] = ..., node: _Optional[_Union[Node, _Mapping]] = ..., tokens: _Optional[_Iterable[bytes]] = ...) -> None: ...

class KeepRequest(_message.Message):
    __slots__ = ("job", "epoch", "capsules", "outcome")
    JOB_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CAPSULES_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    job: str
    epoch: Epoch
    capsules: _containers.RepeatedCompositeFieldContainer[CapsuleRecord]
    outcome: Outcome
    def __init__(self, job: _Optional[str] = ..., epoch: _Optional[_Union[Epoch, _Mapping]] = ..., capsules: _Optional[_Iterable[_Union[CapsuleRecord, _Mapping]]] = ..., outcome: _Optional[_Union[Outcome, _Mapping]] = ...) -> None: ...

class KeepReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class OpenBulkRequest(_message.Message):
    __slots__ = ("job", "epoch")
    JOB_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    job: str
    epoch: Epoch
    def __init__(self, job: _Optional[str] = ..., epoch: _Optional[_Union[Epoch, _Mapping]] = ...) -> None: ...

class OpenBulkReply(_message.Message):
    __slots__ = ("port", "ticket", "address")
    PORT_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    port: int
    ticket: bytes
    address: str
    def __init__(self, port: _Optional[int] = ..., ticket: _Optional[bytes] = ..., address: _Optional[str] = ...) -> None: ...

class SecureRequest(_message.Message):
    __slots__ = ("job", "epoch")
    JOB_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    job: str
    epoch: Epoch
    def __init__(self, job: _Optional[str] = ..., epoch: _Optional[_Union[Epoch, _Mapping]] = ...) -> None: ...

class SecureReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SlotSource(_message.Message):
    __slots__ = ("rank", "node", "slot")
    RANK_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    rank: int
    node: int
    slot: str
    def __init__(self, rank: _Optional[int] = ..., node: _Optional[int] = ..., slot: _Optional[str] = ...) -> None: ...

class LostRank(_message.Message):
    __slots__ = ("rank", "keeper", "section")
    RANK_FIELD_NUMBER: _ClassVar[int]
    KEEPER_FIELD_NUMBER: _ClassVar[int]
    SECTION_FIELD_NUMBER: _ClassVar[int]
    rank: int
    keeper: int
    section: bool
    def __init__(self, rank: _Optional[int] = ..., keeper: _Optional[int] = ..., section: bool = ...) -> None: ...

class RebuildRequest(_message.Message):
    __slots__ = ("manifest", "base_manifest", "decision", "version", "node_index", "nodes", "slots", "lost", "onto", "guard_manifest", "parity")
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    BASE_MANIFEST_FIELD_NUMBER: _ClassVar[int]
    DECISION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NODE_INDEX_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    ONTO_FIELD_NUMBER: _ClassVar[int]
    GUARD_MANIFEST_FIELD_NUMBER: _ClassVar[int]
    PARITY_FIELD_NUMBER: _ClassVar[int]
    manifest: Manifest
    base_manifest: Manifest
    decision: Decision
    version: Version
    node_index: int
    nodes: _containers.RepeatedCompositeFieldContainer[Node]
    slots: _containers.RepeatedCompositeFieldContainer[SlotSource]
    lost: _containers.RepeatedCompositeFieldContainer[LostRank]
    onto: Node
    guard_manifest: Manifest
    parity: _containers.RepeatedCompositeFieldContainer[SlotSource]
    def __init__(self, manifest: _Optional[_Union[Manifest, _Mapping]] = ..., base_manifest: _Optional[_Union[Manifest, _Mapping]] = ..., decision: _Optional[_Union[Decision, _Mapping]] = ..., version: _Optional[_Union[Version, _Mapping]] = ..., node_index: _Optional[int] = ..., nodes: _Optional[_Iterable[_Union[Node, _Mapping]]] = ..., slots: _Optional[_Iterable[_Union[SlotSource, _Mapping]]] = ..., lost: _Optional[_Iterable[_Union[LostRank, _Mapping]]] = ..., onto: _Optional[_Union[Node, _Mapping]] = ..., guard_manifest: _Optional[_Union[Manifest, _Mapping]] = ..., parity: _Optional[_Iterable[_Union[SlotSource, _Mapping]]] = ...) -> None: ...

class DamagedSlot(_message.Message):
    __slots__ = ("node", "slot")
    NODE_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    node: str
    slot: str
    def __init__(self, node: _Optional[str] = ..., slot: _Optional[str] = ...) -> None: ...

class RebuildReply(_message.Message):
    __slots__ = ("slots", "read_bytes", "damaged")
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    READ_BYTES_FIELD_NUMBER: _ClassVar[int]
    DAMAGED_FIELD_NUMBER: _ClassVar[int]
    slots: _containers.RepeatedCompositeFieldContainer[SlotHeader]
    read_bytes: int
    damaged: _containers.RepeatedCompositeFieldContainer[DamagedSlot]
    def __init__(self, slots: _Optional[_Iterable[_Union[SlotHeader, _Mapping]]] = ..., read_bytes: _Optional[int] = ..., damaged: _Optional[_Iterable[_Union[DamagedSlot, _Mapping]]] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ("job", "deep")
    JOB_FIELD_NUMBER: _ClassVar[int]
    DEEP_FIELD_NUMBER: _ClassVar[int]
    job: str
    deep: bool
    def __init__(self, job: _Optional[str] = ..., deep: bool = ...) -> None: ...

class RankStatus(_message.Message):
    __slots__ = ("rank", "node", "alive", "closed", "step", "sealed", "sealed_age_s", "bytes", "trouble", "pid", "slots", "wanted_slots")
    RANK_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SEALED_FIELD_NUMBER: _ClassVar[int]
    SEALED_AGE_S_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    TROUBLE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    WANTED_SLOTS_FIELD_NUMBER: _ClassVar[int]
    rank: int
    node: str
    alive: bool
    closed: bool
    step: int
    sealed: Version
    sealed_age_s: float
    bytes: int
    trouble: str
    pid: int
    slots: int
    wanted_slots: int
    def __init__(self, rank: _Optional[int] = ..., node: _Optional[str] = ..., alive: bool = ..., closed: bool = ..., step: _Optional[int] = ..., sealed: _Optional[_Union[Version, _Mapping]] = ..., sealed_age_s: _Optional[float] = ..., bytes: _Optional[int] = ..., trouble: _Optional[str] = ..., pid: _Optional[int] = ..., slots: _Optional[int] = ..., wanted_slots: _Optional[int] = ...) -> None: ...

class JobStatus(_message.Message):
    __slots__ = ("job", "named", "world", "epoch", "whole", "base", "ranks", "silent_nodes", "backing", "up_s", "script", "every", "degraded", "degraded_s", "mismatched", "held_bytes", "peak_bytes", "signals", "exchange", "storage", "ended_s", "kept_s", "other_format_slots", "other_format_bytes")
    JOB_FIELD_NUMBER: _ClassVar[int]
    NAMED_FIELD_NUMBER: _ClassVar[int]
    WORLD_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    SILENT_NODES_FIELD_NUMBER: _ClassVar[int]
    BACKING_FIELD_NUMBER: _ClassVar[int]
    UP_S_FIELD_NUMBER: _ClassVar[int]
    SCRIPT_FIELD_NUMBER: _ClassVar[int]
    EVERY_FIELD_NUMBER: _ClassVar[int]
    DEGRADED_FIELD_NUMBER: _ClassVar[int]
    DEGRADED_S_FIELD_NUMBER: _ClassVar[int]
    MISMATCHED_FIELD_NUMBER: _ClassVar[int]
    HELD_BYTES_FIELD_NUMBER: _ClassVar[int]
    PEAK_BYTES_FIELD_NUMBER: _ClassVar[int]
    SIGNALS_FIELD_NUMBER: _ClassVar[int]
    EXCHANGE_FIELD_NUMBER: _ClassVar[int]
    STORAGE_FIELD_NUMBER: _ClassVar[int]
    ENDED_S_FIELD_NUMBER: _ClassVar[int]
    KEPT_S_FIELD_NUMBER: _ClassVar[int]
    OTHER_FORMAT_SLOTS_FIELD_NUMBER: _ClassVar[int]
    OTHER_FORMAT_BYTES_FIELD_NUMBER: _ClassVar[int]
    job: str
    named: bool
    world: int
    epoch: Epoch
    whole: int
    base: Version
    ranks: _containers.RepeatedCompositeFieldContainer[RankStatus]
    silent_nodes: _containers.RepeatedScalarFieldContainer[str]
    backing: str
    up_s: float
    script: str
    every: int
    degraded: bool
    degraded_s: float
    mismatched: _containers.RepeatedScalarFieldContainer[int]
    held_bytes: int
    peak_bytes: int
    signals: _containers.RepeatedCompositeFieldContainer[NodeSignal]
    exchange: ExchangeStatus
    storage: StorageStatus
    ended_s: float
    kept_s: float
    other_format_slots: int
    other_format_bytes: int
    def __init__(self, job: _Optional[str] = ..., named: bool = ..., world: _Optional[int] = ..., epoch: _Optional[_Union[Epoch, _Mapping]] = ..., whole: _Optional[int] = ..., base: _Optional[_Union[Version, _Mapping]] = ..., ranks: _Optional[_Iterable[_Union[RankStatus, _Mapping]]] = ..., silent_nodes: _Optional[_Iterable[str]] = ..., backing: _Optional[str] = ..., up_s: _Optional[float] = ..., script: _Optional[str] = ..., every: _Optional[int] = ..., degraded: bool = ..., degraded_s: _Optional[float] = ..., mismatched: _Optional[_Iterable[int]] = ..., held_bytes: _Optional[int] = ..., peak_bytes: _Optional[int] = ..., signals: _Optional[_Iterable[_Union[NodeSignal, _Mapping]]] = ..., exchange: _Optional[_Union[ExchangeStatus, _Mapping]] = ..., storage: _Optional[_Union[StorageStatus, _Mapping]] = ..., ended_s: _Optional[float] = ..., kept_s: _Optional[float] = ..., other_format_slots: _Optional[int] = ..., other_format_bytes: _Optional[int] = ...) -> None: ...

class StorageStatus(_message.Message):
    __slots__ = ("persisted", "age_s", "nbytes", "took_s", "step", "since_s", "written_bytes", "total_bytes", "trouble", "every_s")
    PERSISTED_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    TOOK_S_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SINCE_S_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    TROUBLE_FIELD_NUMBER: _ClassVar[int]
    EVERY_S_FIELD_NUMBER: _ClassVar[int]
    persisted: int
    age_s: float
    nbytes: int
    took_s: float
    step: int
    since_s: float
    written_bytes: int
    total_bytes: int
    trouble: str
    every_s: float
    def __init__(self, persisted: _Optional[int] = ..., age_s: _Optional[float] = ..., nbytes: _Optional[int] = ..., took_s: _Optional[float] = ..., step: _Optional[int] = ..., since_s: _Optional[float] = ..., written_bytes: _Optional[int] = ..., total_bytes: _Optional[int] = ..., trouble: _Optional[str] = ..., every_s: _Optional[float] = ...) -> None: ...

class ExchangeStatus(_message.Message):
    __slots__ = ("protected", "protected_age_s", "turn", "turn_age_s", "turn_bytes", "received_bytes", "bytes_per_s", "lanes", "last_turn_s", "sent_bytes", "pace_bytes_per_s", "pace_reason", "parity_bytes", "extra_slot_bytes", "replays", "choice")
    PROTECTED_FIELD_NUMBER: _ClassVar[int]
    PROTECTED_AGE_S_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    TURN_AGE_S_FIELD_NUMBER: _ClassVar[int]
    TURN_BYTES_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    LANES_FIELD_NUMBER: _ClassVar[int]
    LAST_TURN_S_FIELD_NUMBER: _ClassVar[int]
    SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    PACE_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    PACE_REASON_FIELD_NUMBER: _ClassVar[int]
    PARITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    EXTRA_SLOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    REPLAYS_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    protected: int
    protected_age_s: float
    turn: int
    turn_age_s: float
    turn_bytes: int
    received_bytes: int
    bytes_per_s: float
    lanes: _containers.RepeatedCompositeFieldContainer[UnguardedLane]
    last_turn_s: float
    sent_bytes: int
    pace_bytes_per_s: int
    pace_reason: str
    parity_bytes: int
    extra_slot_bytes: int
    replays: _containers.RepeatedCompositeFieldContainer[ReplayStatus]
    choice: str
    def __init__(self, protected: _Optional[int] = ..., protected_age_s: _Optional[float] = ..., turn: _Optional[int] = ..., turn_age_s: _Optional[float] = ..., turn_bytes: _Optional[int] = ..., received_bytes: _Optional[int] = ..., bytes_per_s: _Optional[float] = ..., lanes: _Optional[_Iterable[_Union[UnguardedLane, _Mapping]]] = ..., last_turn_s: _Optional[float] = ..., sent_bytes: _Optional[int] = ..., pace_bytes_per_s: _Optional[int] = ..., pace_reason: _Optional[str] = ..., parity_bytes: _Optional[int] = ..., extra_slot_bytes: _Optional[int] = ..., replays: _Optional[_Iterable[_Union[ReplayStatus, _Mapping]]] = ..., choice: _Optional[str] = ...) -> None: ...

class ReplayStatus(_message.Message):
    __slots__ = ("lane", "reason", "verified", "lag", "marks", "cpu_s", "left_out", "log", "verdict")
    LANE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_FIELD_NUMBER: _ClassVar[int]
    LAG_FIELD_NUMBER: _ClassVar[int]
    MARKS_FIELD_NUMBER: _ClassVar[int]
    CPU_S_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    LOG_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    lane: int
    reason: str
    verified: int
    lag: int
    marks: int
    cpu_s: float
    left_out: int
    log: int
    verdict: str
    def __init__(self, lane: _Optional[int] = ..., reason: _Optional[str] = ..., verified: _Optional[int] = ..., lag: _Optional[int] = ..., marks: _Optional[int] = ..., cpu_s: _Optional[float] = ..., left_out: _Optional[int] = ..., log: _Optional[int] = ..., verdict: _Optional[str] = ...) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("node", "node_id", "version", "pid", "held_bytes", "limit_bytes", "directory", "jobs", "round_bytes_sent", "capsule_bytes_sent", "domain", "beat_bytes_sent", "beats_sent", "spare_bytes", "spare_limit_bytes", "scrubbed_bytes", "damaged_slots", "repaired_slots", "agents", "damaged", "refused")
    NODE_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    HELD_BYTES_FIELD_NUMBER: _ClassVar[int]
    LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    JOBS_FIELD_NUMBER: _ClassVar[int]
    ROUND_BYTES_SENT_FIELD_NUMBER: _ClassVar[int]
    CAPSULE_BYTES_SENT_FIELD_NUMBER: _ClassVar[int]
    DOMAIN_FIELD_NUMBER: _ClassVar[int]
    BEAT_BYTES_SENT_FIELD_NUMBER: _ClassVar[int]
    BEATS_SENT_FIELD_NUMBER: _ClassVar[int]
    SPARE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SPARE_LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    SCRUBBED_BYTES_FIELD_NUMBER: _ClassVar[int]
    DAMAGED_SLOTS_FIELD_NUMBER: _ClassVar[int]
    REPAIRED_SLOTS_FIELD_NUMBER: _ClassVar[int]
    AGENTS_FIELD_NUMBER: _ClassVar[int]
    DAMAGED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    node: str
    node_id: str
    version: str
    pid: int
    held_bytes: int
    limit_bytes: int
    directory: str
    jobs: _containers.RepeatedCompositeFieldContainer[JobStatus]
    round_bytes_sent: int
    capsule_bytes_sent: int
    domain: str
    beat_bytes_sent: int
    beats_sent: int
    spare_bytes: int
    spare_limit_bytes: int
    scrubbed_bytes: int
    damaged_slots: int
    repaired_slots: int
    agents: _containers.RepeatedScalarFieldContainer[int]
    damaged: _containers.RepeatedCompositeFieldContainer[DamagedJob]
    refused: RefusedStatus
    def __init__(self, node: _Optional[str] = ..., node_id: _Optional[str] = ..., version: _Optional[str] = ..., pid: _Optional[int] = ..., held_bytes: _Optional[int] = ..., limit_bytes: _Optional[int] = ..., directory: _Optional[str] = ..., jobs: _Optional[_Iterable[_Union[JobStatus, _Mapping]]] = ..., round_bytes_sent: _Optional[int] = ..., capsule_bytes_sent: _Optional[int] = ..., domain: _Optional[str] = ..., beat_bytes_sent: _Optional[int] = ..., beats_sent: _Optional[int] = ..., spare_bytes: _Optional[int] = ..., spare_limit_bytes: _Optional[int] = ..., scrubbed_bytes: _Optional[int] = ..., damaged_slots: _Optional[int] = ..., repaired_slots: _Optional[int] = ..., agents: _Optional[_Iterable[int]] = ..., damaged: _Optional[_Iterable[_Union[DamagedJob, _Mapping]]] = ..., refused: _Optional[_Union[RefusedStatus, _Mapping]] = ...) -> None: ...

class RefusedStatus(_message.Message):
    __slots__ = ("total", "last_minute", "reasons", "more_reasons")
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    LAST_MINUTE_FIELD_NUMBER: _ClassVar[int]
    REASONS_FIELD_NUMBER: _ClassVar[int]
    MORE_REASONS_FIELD_NUMBER: _ClassVar[int]
    total: int
    last_minute: int
    reasons: _containers.RepeatedCompositeFieldContainer[RefusedReason]
    more_reasons: int
    def __init__(self, total: _Optional[int] = ..., last_minute: _Optional[int] = ..., reasons: _Optional[_Iterable[_Union[RefusedReason, _Mapping]]] = ..., more_reasons: _Optional[int] = ...) -> None: ...

class RefusedReason(_message.Message):
    __slots__ = ("reason", "total", "last_minute", "age_s", "addresses", "more_addresses")
    REASON_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    LAST_MINUTE_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    MORE_ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    reason: str
    total: int
    last_minute: int
    age_s: float
    addresses: _containers.RepeatedScalarFieldContainer[str]
    more_addresses: int
    def __init__(self, reason: _Optional[str] = ..., total: _Optional[int] = ..., last_minute: _Optional[int] = ..., age_s: _Optional[float] = ..., addresses: _Optional[_Iterable[str]] = ..., more_addresses: _Optional[int] = ...) -> None: ...

class DamagedJob(_message.Message):
    __slots__ = ("job", "reason", "held_bytes", "slots")
    JOB_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    HELD_BYTES_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    job: str
    reason: str
    held_bytes: int
    slots: int
    def __init__(self, job: _Optional[str] = ..., reason: _Optional[str] = ..., held_bytes: _Optional[int] = ..., slots: _Optional[int] = ...) -> None: ...

class PurgeRequest(_message.Message):
    __slots__ = ("job", "memory_only")
    JOB_FIELD_NUMBER: _ClassVar[int]
    MEMORY_ONLY_FIELD_NUMBER: _ClassVar[int]
    job: str
    memory_only: bool
    def __init__(self, job: _Optional[str] = ..., memory_only: bool = ...) -> None: ...

class PurgeReply(_message.Message):
    __slots__ = ("freed_bytes",)
    FREED_BYTES_FIELD_NUMBER: _ClassVar[int]
    freed_bytes: int
    def __init__(self, freed_bytes: _Optional[int] = ...) -> None: ...

class PersistJobRequest(_message.Message):
    __slots__ = ("job", "step", "epoch", "flush")
    JOB_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FLUSH_FIELD_NUMBER: _ClassVar[int]
    job: str
    step: int
    epoch: Epoch
    flush: bool
    def __init__(self, job: _Optional[str] = ..., step: _Optional[int] = ..., epoch: _Optional[_Union[Epoch, _Mapping]] = ..., flush: bool = ...) -> None: ...

class PersistJobReply(_message.Message):
    __slots__ = ("step", "epoch", "done", "trouble", "storage")
    STEP_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    TROUBLE_FIELD_NUMBER: _ClassVar[int]
    STORAGE_FIELD_NUMBER: _ClassVar[int]
    step: int
    epoch: Epoch
    done: bool
    trouble: str
    storage: StorageStatus
    def __init__(self, step: _Optional[int] = ..., epoch: _Optional[_Union[Epoch, _Mapping]] = ..., done: bool = ..., trouble: _Optional[str] = ..., storage: _Optional[_Union[StorageStatus, _Mapping]] = ...) -> None: ...

class HoldRequest(_message.Message):
    __slots__ = ("job", "version", "seconds")
    JOB_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    job: str
    version: Version
    seconds: float
    def __init__(self, job: _Optional[str] = ..., version: _Optional[_Union[Version, _Mapping]] = ..., seconds: _Optional[float] = ...) -> None: ...

class HoldReply(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: Version
    def __init__(self, version: _Optional[_Union[Version, _Mapping]] = ...) -> None: ...

class PersistRequest(_message.Message):
    __slots__ = ("job", "epoch", "version", "lineage", "attempt")
    JOB_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    job: str
    epoch: Epoch
    version: Version
    lineage: str
    attempt: int
    def __init__(self, job: _Optional[str] = ..., epoch: _Optional[_Union[Epoch, _Mapping]] = ..., version: _Optional[_Union[Version, _Mapping]] = ..., lineage: _Optional[str] = ..., attempt: _Optional[int] = ...) -> None: ...

class PersistReply(_message.Message):
    __slots__ = ("written_bytes", "total_bytes", "index_digest", "error")
    WRITTEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    INDEX_DIGEST_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    written_bytes: int
    total_bytes: int
    index_digest: str
    error: str
    def __init__(self, written_bytes: _Optional[int] = ..., total_bytes: _Optional[int] = ..., index_digest: _Optional[str] = ..., error: _Optional[str] = ...) -> None: ...

class GatherRequest(_message.Message):
    __slots__ = ("job", "epoch", "node_index", "steps", "mismatched", "requested_every", "layout", "guard")
    JOB_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NODE_INDEX_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    MISMATCHED_FIELD_NUMBER: _ClassVar[int]
    REQUESTED_EVERY_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    GUARD_FIELD_NUMBER: _ClassVar[int]
    job: str
    epoch: Epoch
    node_index: int
    steps: StepReport
    mismatched: _containers.RepeatedScalarFieldContainer[int]
    requested_every: int
    layout: LayoutReport
    guard: GuardReport
    def __init__(self, job: _Optional[str] = ..., epoch: _Optional[_Union[Epoch, _Mapping]] = ..., node_index: _Optional[int] = ..., steps: _Optional[_Union[StepReport, _Mapping]] = ..., mismatched: _Optional[_Iterable[int]] = ..., requested_every: _Optional[int] = ..., layout: _Optional[_Union[LayoutReport, _Mapping]] = ..., guard: _Optional[_Union[GuardReport, _Mapping]] = ...) -> None: ...

class Outcome(_message.Message):
    __slots__ = ("job", "epoch", "until", "open", "mismatched", "every", "interval_start", "layout", "pins")
    JOB_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    UNTIL_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    MISMATCHED_FIELD_NUMBER: _ClassVar[int]
    EVERY_FIELD_NUMBER: _ClassVar[int]
    INTERVAL_START_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    PINS_FIELD_NUMBER: _ClassVar[int]
    job: str
    epoch: Epoch
    until: int
    open: _containers.RepeatedScalarFieldContainer[int]
    mismatched: _containers.RepeatedScalarFieldContainer[int]
    every: int
    interval_start: int
    layout: LayoutOutcome
    pins: Pins
    def __init__(self, job: _Optional[str] = ..., epoch: _Optional[_Union[Epoch, _Mapping]] = ..., until: _Optional[int] = ..., open: _Optional[_Iterable[int]] = ..., mismatched: _Optional[_Iterable[int]] = ..., every: _Optional[int] = ..., interval_start: _Optional[int] = ..., layout: _Optional[_Union[LayoutOutcome, _Mapping]] = ..., pins: _Optional[_Union[Pins, _Mapping]] = ...) -> None: ...

class OutcomeReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class NodeSignal(_message.Message):
    __slots__ = ("node_id", "node", "signal", "reason", "age_s", "agent")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    SIGNAL_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    AGENT_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    node: str
    signal: Signal
    reason: str
    age_s: float
    agent: bool
    def __init__(self, node_id: _Optional[str] = ..., node: _Optional[str] = ..., signal: _Optional[_Union[Signal, str]] = ..., reason: _Optional[str] = ..., age_s: _Optional[float] = ..., agent: bool = ...) -> None: ...

class AgentBeatRequest(_message.Message):
    __slots__ = ("job", "node_id", "launch", "round", "pid", "phase", "nodes", "token", "job_token")
    JOB_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    LAUNCH_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    JOB_TOKEN_FIELD_NUMBER: _ClassVar[int]
    job: str
    node_id: str
    launch: str
    round: int
    pid: int
    phase: AgentPhase
    nodes: _containers.RepeatedCompositeFieldContainer[Node]
    token: bytes
    job_token: bytes
    def __init__(self, job: _Optional[str] = ..., node_id: _Optional[str] = ..., launch: _Optional[str] = ..., round: _Optional[int] = ..., pid: _Optional[int] = ..., phase: _Optional[_Union[AgentPhase, str]] = ..., nodes: _Optional[_Iterable[_Union[Node, _Mapping]]] = ..., token: _Optional[bytes] = ..., job_token: _Optional[bytes] = ...) -> None: ...

class AgentBeatReply(_message.Message):
    __slots__ = ("watchers", "unknown_round", "whole")
    WATCHERS_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_ROUND_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    watchers: _containers.RepeatedCompositeFieldContainer[Node]
    unknown_round: bool
    whole: int
    def __init__(self, watchers: _Optional[_Iterable[_Union[Node, _Mapping]]] = ..., unknown_round: bool = ..., whole: _Optional[int] = ...) -> None: ...

class SignalsRequest(_message.Message):
    __slots__ = ("job", "version", "wait_ms")
    JOB_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    job: str
    version: int
    wait_ms: int
    def __init__(self, job: _Optional[str] = ..., version: _Optional[int] = ..., wait_ms: _Optional[int] = ...) -> None: ...

class SignalsReply(_message.Message):
    __slots__ = ("version", "launch", "round", "nodes")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LAUNCH_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    version: int
    launch: str
    round: int
    nodes: _containers.RepeatedCompositeFieldContainer[NodeSignal]
    def __init__(self, version: _Optional[int] = ..., launch: _Optional[str] = ..., round: _Optional[int] = ..., nodes: _Optional[_Iterable[_Union[NodeSignal, _Mapping]]] = ...) -> None: ...

class Stall(_message.Message):
    __slots__ = ("rank", "step", "still_s", "usual_s", "stopped")
    RANK_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    STILL_S_FIELD_NUMBER: _ClassVar[int]
    USUAL_S_FIELD_NUMBER: _ClassVar[int]
    STOPPED_FIELD_NUMBER: _ClassVar[int]
    rank: int
    step: int
    still_s: float
    usual_s: float
    stopped: bool
    def __init__(self, rank: _Optional[int] = ..., step: _Optional[int] = ..., still_s: _Optional[float] = ..., usual_s: _Optional[float] = ..., stopped: bool = ...) -> None: ...

class NodeReport(_message.Message):
    __slots__ = ("node_id", "signal", "reason", "stall")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    SIGNAL_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    STALL_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    signal: Signal
    reason: str
    stall: Stall
    def __init__(self, node_id: _Optional[str] = ..., signal: _Optional[_Union[Signal, str]] = ..., reason: _Optional[str] = ..., stall: _Optional[_Union[Stall, _Mapping]] = ...) -> None: ...

class LastHeard(_message.Message):
    __slots__ = ("node_id", "age_ms")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    AGE_MS_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    age_ms: int
    def __init__(self, node_id: _Optional[str] = ..., age_ms: _Optional[int] = ...) -> None: ...

class BeatRequest(_message.Message):
    __slots__ = ("job", "launch", "round", "source", "target", "reports", "last_heard")
    JOB_FIELD_NUMBER: _ClassVar[int]
    LAUNCH_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    REPORTS_FIELD_NUMBER: _ClassVar[int]
    LAST_HEARD_FIELD_NUMBER: _ClassVar[int]
    job: str
    launch: str
    round: int
    source: str
    target: str
    reports: _containers.RepeatedCompositeFieldContainer[NodeReport]
    last_heard: _containers.RepeatedCompositeFieldContainer[LastHeard]
    def __init__(self, job: _Optional[str] = ..., launch: _Optional[str] = ..., round: _Optional[int] = ..., source: _Optional[str] = ..., target: _Optional[str] = ..., reports: _Optional[_Iterable[_Union[NodeReport, _Mapping]]] = ..., last_heard: _Optional[_Iterable[_Union[LastHeard, _Mapping]]] = ...) -> None: ...

class BeatReply(_message.Message):
    __slots__ = ("reports", "last_heard")
    REPORTS_FIELD_NUMBER: _ClassVar[int]
    LAST_HEARD_FIELD_NUMBER: _ClassVar[int]
    reports: _containers.RepeatedCompositeFieldContainer[NodeReport]
    last_heard: _containers.RepeatedCompositeFieldContainer[LastHeard]
    def __init__(self, reports: _Optional[_Iterable[_Union[NodeReport, _Mapping]]] = ..., last_heard: _Optional[_Iterable[_Union[LastHeard, _Mapping]]] = ...) -> None: ...

class LocalRequest(_message.Message):
    __slots__ = ("report", "slots", "who", "protocol", "oldest")
    REPORT_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    WHO_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    OLDEST_FIELD_NUMBER: _ClassVar[int]
    report: ReportRequest
    slots: SlotsRequest
    who: bool
    protocol: int
    oldest: int
    def __init__(self, report: _Optional[_Union[ReportRequest, _Mapping]] = ..., slots: _Optional[_Union[SlotsRequest, _Mapping]] = ..., who: bool = ..., protocol: _Optional[int] = ..., oldest: _Optional[int] = ...) -> None: ...

class LocalReply(_message.Message):
    __slots__ = ("report", "descriptors", "caller", "calls", "status", "error", "protocol", "oldest")
    REPORT_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTORS_FIELD_NUMBER: _ClassVar[int]
    CALLER_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    OLDEST_FIELD_NUMBER: _ClassVar[int]
    report: ReportReply
    descriptors: int
    caller: Caller
    calls: int
    status: int
    error: str
    protocol: int
    oldest: int
    def __init__(self, report: _Optional[_Union[ReportReply, _Mapping]] = ..., descriptors: _Optional[int] = ..., caller: _Optional[_Union[Caller, _Mapping]] = ..., calls: _Optional[int] = ..., status: _Optional[int] = ..., error: _Optional[str] = ..., protocol: _Optional[int] = ..., oldest: _Optional[int] = ...) -> None: ...

class SlotsRequest(_message.Message):
    __slots__ = ("job", "epoch", "rank", "returned", "slots")
    JOB_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    RETURNED_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    job: str
    epoch: Epoch
    rank: int
    returned: _containers.RepeatedScalarFieldContainer[str]
    slots: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, job: _Optional[str] = ..., epoch: _Optional[_Union[Epoch, _Mapping]] = ..., rank: _Optional[int] = ..., returned: _Optional[_Iterable[str]] = ..., slots: _Optional[_Iterable[str]] = ...) -> None: ...

class Caller(_message.Message):
    __slots__ = ("pid", "pid_start", "parent")
    PID_FIELD_NUMBER: _ClassVar[int]
    PID_START_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    pid: int
    pid_start: int
    parent: int
    def __init__(self, pid: _Optional[int] = ..., pid_start: _Optional[int] = ..., parent: _Optional[int] = ...) -> None: ...

class LeaseRecord(_message.Message):
    __slots__ = ("rank", "pid", "pid_start", "parent", "closed", "failed")
    RANK_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    PID_START_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    rank: int
    pid: int
    pid_start: int
    parent: int
    closed: bool
    failed: bool
    def __init__(self, rank: _Optional[int] = ..., pid: _Optional[int] = ..., pid_start: _Optional[int] = ..., parent: _Optional[int] = ..., closed: bool = ..., failed: bool = ...) -> None: ...

class JobRecord(_message.Message):
    __slots__ = ("manifest", "decision", "node_index", "leases", "had_whole", "base_manifest", "holders", "dropped", "before", "restores", "pins", "guard_manifest", "not_recomputed", "machine", "accepted_tokens")
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    DECISION_FIELD_NUMBER: _ClassVar[int]
    NODE_INDEX_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    HAD_WHOLE_FIELD_NUMBER: _ClassVar[int]
    BASE_MANIFEST_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    RESTORES_FIELD_NUMBER: _ClassVar[int]
    PINS_FIELD_NUMBER: _ClassVar[int]
    GUARD_MANIFEST_FIELD_NUMBER: _ClassVar[int]
    NOT_RECOMPUTED_FIELD_NUMBER: _ClassVar[int]
    MACHINE_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    manifest: Manifest
    decision: Decision
    node_index: int
    leases: _containers.RepeatedCompositeFieldContainer[LeaseRecord]
    had_whole: bool
    base_manifest: Manifest
    holders: _containers.RepeatedScalarFieldContainer[int]
    dropped: _containers.RepeatedScalarFieldContainer[str]
    before: JobRecord
    restores: RestoreCount
    pins: Pins
    guard_manifest: Manifest
    not_recomputed: str
    machine: str
    accepted_tokens: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, manifest: _Optional[_Union[Manifest, _Mapping]] = ..., decision: _Optional[_Union[Decision, _Mapping]] = ..., node_index: _Optional[int] = ..., leases: _Optional[_Iterable[_Union[LeaseRecord, _Mapping]]] = ..., had_whole: bool = ..., base_manifest: _Optional[_Union[Manifest, _Mapping]] = ..., holders: _Optional[_Iterable[int]] = ..., dropped: _Optional[_Iterable[str]] = ..., before: _Optional[_Union[JobRecord, _Mapping]] = ..., restores: _Optional[_Union[RestoreCount, _Mapping]] = ..., pins: _Optional[_Union[Pins, _Mapping]] = ..., guard_manifest: _Optional[_Union[Manifest, _Mapping]] = ..., not_recomputed: _Optional[str] = ..., machine: _Optional[str] = ..., accepted_tokens: _Optional[_Iterable[bytes]] = ...) -> None: ...

class PinsRecord(_message.Message):
    __slots__ = ("epoch", "pins")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PINS_FIELD_NUMBER: _ClassVar[int]
    epoch: Epoch
    pins: Pins
    def __init__(self, epoch: _Optional[_Union[Epoch, _Mapping]] = ..., pins: _Optional[_Union[Pins, _Mapping]] = ...) -> None: ...

class LeafEntry(_message.Message):
    __slots__ = ("name", "dtype", "shape", "stride", "nbytes", "staged", "global_shape", "global_offset", "offset", "place", "form")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    STRIDE_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    STAGED_FIELD_NUMBER: _ClassVar[int]
    GLOBAL_SHAPE_FIELD_NUMBER: _ClassVar[int]
    GLOBAL_OFFSET_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    FORM_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    stride: _containers.RepeatedScalarFieldContainer[int]
    nbytes: int
    staged: bool
    global_shape: _containers.RepeatedScalarFieldContainer[int]
    global_offset: _containers.RepeatedScalarFieldContainer[int]
    offset: int
    place: Place
    form: str
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., stride: _Optional[_Iterable[int]] = ..., nbytes: _Optional[int] = ..., staged: bool = ..., global_shape: _Optional[_Iterable[int]] = ..., global_offset: _Optional[_Iterable[int]] = ..., offset: _Optional[int] = ..., place: _Optional[_Union[Place, str]] = ..., form: _Optional[str] = ...) -> None: ...

class LeafTable(_message.Message):
    __slots__ = ("leaves", "data_bytes")
    LEAVES_FIELD_NUMBER: _ClassVar[int]
    DATA_BYTES_FIELD_NUMBER: _ClassVar[int]
    leaves: _containers.RepeatedCompositeFieldContainer[LeafEntry]
    data_bytes: int
    def __init__(self, leaves: _Optional[_Iterable[_Union[LeafEntry, _Mapping]]] = ..., data_bytes: _Optional[int] = ...) -> None: ...

class SymbolicLeaf(_message.Message):
    __slots__ = ("name", "dtype", "staged", "item_bytes", "global_shape", "axes", "order", "literal", "form")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    STAGED_FIELD_NUMBER: _ClassVar[int]
    ITEM_BYTES_FIELD_NUMBER: _ClassVar[int]
    GLOBAL_SHAPE_FIELD_NUMBER: _ClassVar[int]
    AXES_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    LITERAL_FIELD_NUMBER: _ClassVar[int]
    FORM_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: str
    staged: bool
    item_bytes: int
    global_shape: _containers.RepeatedScalarFieldContainer[int]
    axes: _containers.RepeatedScalarFieldContainer[int]
    order: _containers.RepeatedScalarFieldContainer[int]
    literal: LeafEntry
    form: str
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., staged: bool = ..., item_bytes: _Optional[int] = ..., global_shape: _Optional[_Iterable[int]] = ..., axes: _Optional[_Iterable[int]] = ..., order: _Optional[_Iterable[int]] = ..., literal: _Optional[_Union[LeafEntry, _Mapping]] = ..., form: _Optional[str] = ...) -> None: ...

class SymbolicTable(_message.Message):
    __slots__ = ("leaves", "axes")
    LEAVES_FIELD_NUMBER: _ClassVar[int]
    AXES_FIELD_NUMBER: _ClassVar[int]
    leaves: _containers.RepeatedCompositeFieldContainer[SymbolicLeaf]
    axes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, leaves: _Optional[_Iterable[_Union[SymbolicLeaf, _Mapping]]] = ..., axes: _Optional[_Iterable[int]] = ...) -> None: ...
