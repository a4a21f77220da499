"""Tests the proofs of calls and replies."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from reft.wire import proof
from reft.wire.proof import Challenges, ProvedCall, UnprovedCall, prove_call
from reft.wire.v1 import daemon_pb2 as pb

TOKEN, OTHER_TOKEN = bytes(range(32)), bytes(range(1, 33))
METHOD = "/reft.v1.Daemon/Inventory"
REQUEST = pb.InventoryRequest(job="job", launch="launch")


def call_to(challenges: Challenges, token: bytes = TOKEN, node: str = "node", method: str = METHOD) -> ProvedCall:
    return prove_call(token, node, method, "job", challenges.present, REQUEST)[0]


def refuses(challenges: Challenges, call: ProvedCall, match: str = "this call", tokens=(TOKEN,)) -> bool:
    with pytest.raises(UnprovedCall, match=match):
        challenges.check(call.metadata(), METHOD, tokens)
    return True


def test_a_call_is_proved_once():
    challenges = Challenges("node")
    call = call_to(challenges)
    assert challenges.check(call.metadata(), METHOD, (TOKEN,)) == call
    assert refuses(challenges, call, "made before")
    assert challenges.check(call_to(challenges).metadata(), METHOD, (TOKEN,)), "the next call has another nonce"


def test_the_token_is_in_nothing_that_travels_or_is_printed():
    call = call_to(Challenges("node"))
    told = repr((call, call.metadata(), call.reply_proof(0, b"")))
    assert repr(TOKEN)[2:-1] not in told and TOKEN.hex() not in told
    assert all(TOKEN not in value for _, value in call.metadata() if isinstance(value, bytes))


@pytest.mark.parametrize(
    "change",
    [
        {"token": OTHER_TOKEN}, {"node": "node2"}, {"method": "/reft.v1.Daemon/Read"}, {"job": "job2"},
        {"nonce": bytes(16)}, {"request": bytes(32)},
    ],
)  # fmt: skip
def test_each_part_of_a_call_counts(change):
    """The proof is of one call, and what arrives is another one."""
    challenges = Challenges("node")
    call = call_to(challenges)
    metadata = {**dict(call.metadata()), **dict(replace(call, **change).metadata())}
    metadata[proof.PROOF_KEY] = call.call_proof()
    method, tokens = change.get("method", METHOD), (change.get("token", TOKEN),)
    challenges._node = change.get("node", "node")
    with pytest.raises(UnprovedCall, match="proof of the job's token"):
        challenges.check(tuple(metadata.items()), method, tokens)


def test_all_parts_of_a_call_are_named_above():
    assert {each.name for each in fields(ProvedCall)} == {
        "token", "node", "method", "job", "nonce", "request", "challenge",
    }  # fmt: skip


def test_the_bytes_of_proofs_stay():
    """Both ends must agree on them: another order or label is another protocol."""
    call = ProvedCall(TOKEN, "node", METHOD, "job", bytes(16), bytes(16), proof.digest_of(b"request"))
    assert call.call_proof().hex() == "29456c84130d99143f6f950a8a92c17685412e2ef05e2eb23d3e492dd1a46aa5"
    assert call.reply_proof(5, b"why").hex() == "3066ff08b912bc53540f398d4ce62dd93af93d1765ee2a5cf5f96da17437bdba"


def test_a_proof_does_not_run_over_from_one_part_into_the_next():
    call = call_to(Challenges("node"))
    assert replace(call, node="nod", method="e" + METHOD).call_proof() != call.call_proof()
    assert replace(call, job="jo", challenge=b"b" + call.challenge).call_proof() != call.call_proof()


@pytest.mark.parametrize(
    "key", [proof.JOB_KEY, proof.CHALLENGE_KEY, proof.NONCE_KEY, proof.DIGEST_KEY, proof.PROOF_KEY]
)
@pytest.mark.parametrize("value", [None, b"", "text", b"\0" * 15])
def test_metadata_that_lacks_a_part_proves_nothing(key, value):
    challenges = Challenges("node")
    metadata = {**dict(call_to(challenges).metadata()), key: value}
    with pytest.raises(UnprovedCall):
        challenges.check(tuple(metadata.items()), METHOD, (TOKEN,))
    for nothing in (None, (), (("other", "x"),)):
        with pytest.raises(UnprovedCall):
            challenges.check(nothing, METHOD, (TOKEN,))


def test_without_a_token_nobody_is_admitted():
    challenges = Challenges("node")
    for token in (b"", bytes(32), TOKEN):
        assert refuses(challenges, call_to(challenges, token), tokens=())
        assert refuses(challenges, call_to(challenges, token), tokens=(b"",))


def test_one_of_several_tokens_is_enough_and_proves_the_reply():
    challenges = Challenges("node")
    call = call_to(challenges, OTHER_TOKEN)
    assert challenges.check(call.metadata(), METHOD, (TOKEN, OTHER_TOKEN)).token == OTHER_TOKEN


def test_a_restarted_daemon_refuses_the_calls_of_before():
    call, restarted = call_to(Challenges("node")), Challenges("node")
    assert refuses(restarted, call, "proof of the job's token")
    assert proof.challenge_in(restarted.metadata()) == restarted.present


def test_nonces_are_bounded_and_only_proved_calls_leave_one(monkeypatch):
    monkeypatch.setattr(proof, "NONCES_MAX", 4)
    challenges = Challenges("node")
    for _ in range(20):
        assert refuses(challenges, call_to(challenges, OTHER_TOKEN))
    first = challenges.present
    calls = [call_to(challenges) for _ in range(4)]
    for call in calls:
        assert challenges.present == first
        challenges.check(call.metadata(), METHOD, (TOKEN,))
    assert challenges.present != first
    assert all(refuses(challenges, call, "made before") for call in calls), "they are remembered beside the new ones"
    late = prove_call(TOKEN, "node", METHOD, "job", first, REQUEST)[0]
    assert challenges.check(late.metadata(), METHOD, (TOKEN,)), "the challenge before still counts"
    for _ in range(4):
        challenges.check(call_to(challenges).metadata(), METHOD, (TOKEN,))
    assert all(refuses(challenges, call, "proof of the job's token") for call in (*calls, late))
    assert len(challenges._nonces) == 2


def test_the_challenge_before_can_not_be_used_for_ever(monkeypatch):
    monkeypatch.setattr(proof, "NONCES_MAX", 4)
    challenges = Challenges("node")
    first, accepted = challenges.present, 0
    for _ in range(20):
        call = prove_call(TOKEN, "node", METHOD, "job", first, REQUEST)[0]
        try:
            challenges.check(call.metadata(), METHOD, (TOKEN,))
            accepted += 1
        except UnprovedCall:
            continue
    assert accepted == 8 and len(challenges._nonces[first]) == 8


def test_the_request_is_the_one_of_the_proof():
    call, data = prove_call(TOKEN, "node", METHOD, "job", b"", REQUEST)
    call.check_request(data)
    for other in (b"", data[:-1], data + b"\0"):
        with pytest.raises(UnprovedCall, match="not the one"):
            call.check_request(other)


# Replies


def reply_metadata(call: ProvedCall, status: int = 0, reply: bytes = b"reply") -> tuple:
    return ((proof.PROOF_KEY, call.reply_proof(status, reply)),)


def test_a_reply_is_proved():
    call = call_to(Challenges("node"))
    assert call.has_reply(reply_metadata(call), 0, b"reply")
    assert call.has_reply(reply_metadata(call, 5, b"not found"), 5, b"not found")


@pytest.mark.parametrize(
    "change",
    [
        {"token": OTHER_TOKEN}, {"node": "node2"}, {"method": "/reft.v1.Daemon/Read"}, {"job": "job2"},
        {"challenge": bytes(16)}, {"nonce": bytes(16)}, {"request": bytes(32)},
    ],
)  # fmt: skip
def test_each_part_of_a_call_counts_in_its_reply(change):
    call = call_to(Challenges("node"))
    assert not call.has_reply(reply_metadata(replace(call, **change)), 0, b"reply")


def test_another_status_or_other_bytes_are_not_proved():
    call = call_to(Challenges("node"))
    assert not call.has_reply(reply_metadata(call), 5, b"reply")
    assert not call.has_reply(reply_metadata(call), 0, b"other reply")


def test_nobody_without_the_token_proves_a_reply():
    """The server has only what the caller has sent."""
    call = call_to(Challenges("node"))
    for forged in (None, (), call.metadata(), ((proof.PROOF_KEY, ""),), ((proof.PROOF_KEY, "text"),)):
        assert not call.has_reply(forged, 0, b"reply")
    assert call.reply_proof(0, b"") != call.call_proof()


def test_proofs_are_compared_in_constant_time(monkeypatch):
    seen = []
    challenges = Challenges("node")
    call = call_to(challenges)
    monkeypatch.setattr(proof.hmac, "compare_digest", lambda one, other: seen.append((one, other)) or True)
    challenges.check(call.metadata(), METHOD, (TOKEN,))
    assert call.has_reply(((proof.PROOF_KEY, b"x"),), 0, b"")
    assert seen == [(call.call_proof(), call.call_proof()), (b"x", call.reply_proof(0, b""))]


@pytest.mark.parametrize("value", [b"", b"\0" * 15, b"\0" * 17, "\0" * 16])
def test_a_challenge_has_its_length(value):
    assert proof.challenge_in(((proof.CHALLENGE_KEY, value),)) == b""


# Tokens inside messages


def manifest(token: bytes, script: str = "") -> pb.Manifest:
    return pb.Manifest(job="job", token=token, script=script)


def test_a_token_in_a_request_is_veiled():
    request = pb.RebuildRequest(manifest=manifest(TOKEN), base_manifest=manifest(OTHER_TOKEN, "base"))
    kept = pb.RebuildRequest.FromString(request.SerializeToString())
    challenges = Challenges("node")
    call, data = prove_call(TOKEN, "node", METHOD, "job", challenges.present, request)
    assert TOKEN not in data and OTHER_TOKEN not in data and request == kept
    assert prove_call(TOKEN, "node", METHOD, "job", challenges.present, request)[1] != data, "each call has its veil"
    assert call.request == proof.digest_of(data)
    received = pb.RebuildRequest.FromString(data)
    assert received.manifest.token != received.base_manifest.token
    challenges.check(call.metadata(), METHOD, (TOKEN,)).veil_request(received)
    assert received == request


def test_a_token_in_a_reply_is_veiled():
    reply = pb.InventoryReply(manifest=manifest(TOKEN), guard_manifest=manifest(TOKEN), node="n")
    sent = pb.InventoryReply.FromString(reply.SerializeToString())
    call = call_to(Challenges("node"))
    call.veil_reply(sent)
    assert TOKEN not in sent.SerializeToString() and sent.manifest.token != sent.guard_manifest.token
    call.veil_reply(sent)
    assert sent == reply


def test_earlier_tokens_are_veiled_too():
    """With one of them a node calls another one that missed an attach."""
    earlier = [bytes([number]) * 32 for number in (1, 2, 2)]
    request = pb.RebuildRequest(manifest=pb.Manifest(job="job", token=TOKEN, earlier_tokens=earlier))
    call, data = prove_call(TOKEN, "node", METHOD, "job", b"", request)
    received = pb.RebuildRequest.FromString(data)
    assert not any(token in data for token in earlier)
    assert len({received.manifest.token, *received.manifest.earlier_tokens}) == 4
    call.veil_request(received)
    assert received == request


def test_the_veils_of_request_and_reply_differ():
    """Else one XORed with the other would tell the token."""
    request = reply = pb.InventoryReply(manifest=manifest(bytes(32)))
    call, data = prove_call(TOKEN, "node", METHOD, "job", b"", request)
    call.veil_reply(reply)
    assert pb.InventoryReply.FromString(data).manifest.token != reply.manifest.token
