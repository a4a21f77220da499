from reft.wire.slot_format import Bytes

PAST_CACHES: int

def copy(target: Bytes, source: Bytes, /) -> None: ...
