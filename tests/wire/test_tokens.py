"""The mark and the tokens of a manifest."""

from __future__ import annotations

from reft.wire.messages import EARLIER_TOKENS_MAX, earlier_tokens, job_mark
from reft.wire.v1 import daemon_pb2 as pb


def test_a_job_of_an_older_reft_is_marked_by_its_token():
    old = pb.Manifest(token=b"t" * 32)
    assert job_mark(old) == job_mark(pb.Manifest(token=b"t" * 32)) != job_mark(pb.Manifest(token=b"u" * 32))
    assert len(job_mark(old)) == 16 and b"tttt" not in job_mark(old)
    assert job_mark(pb.Manifest(token=b"t" * 32, job_mark=b"m" * 16)) == b"m" * 16


def test_earlier_tokens_are_each_kept_once_and_the_newest_first():
    assert earlier_tokens([b"c", b"b", b"c", b"", b"a"], b"d") == [b"c", b"b", b"a"]
    assert earlier_tokens([b"key", b"old"], b"key") == [b"old"], "a token that follows from a key stays"
    assert len(earlier_tokens([bytes([i]) for i in range(20)], b"new")) == EARLIER_TOKENS_MAX
