"""Proofs that both ends of a call over TCP know a token. The token itself never travels.

    caller                                             callee: one challenge for all callers
      metadata: job, challenge, nonce, digest of
      the request, HMAC("call" ‖ …) ────────────────►  1. the challenge is this process's?
                                                       2. the HMAC is of a token of the job?
                                                       3. the nonce is new?
          ◄── UNAUTHENTICATED, present challenge ────     no: the request is not read
                                                       4. the request has the digest?
      the same HMAC? ◄──────── trailing metadata ────  HMAC("reply" ‖ … ‖ status ‖ digest of the
      no: the node is silent                           reply), and the present challenge

"…" stands for node id of the callee, method, job, challenge, nonce and digest of the request. Each
part has its length in front. The digest of a reply with an error is that of the error's text. A
stream has the proof in its initial metadata, with the status 0 and no digest; if it fails later,
the error has a proof of its own.

Invariants
  1. A callee acts upon a call once, and only if the caller named this node, this method, this job
     and these bytes.
  2. A callee remembers nonces of proved calls only. After NONCES_MAX of them it makes a new
     challenge, and accepts the one before. So memory is bounded, and nobody without a token can
     make it grow. A restarted process has another challenge: older calls prove nothing to it.
  3. A caller acts upon a reply only with the right proof, whatever its status is. Otherwise the
     node counts as one that does not answer.
  4. A challenge that comes without a proof is good for one more try. A server that invents
     challenges can only refuse.
  5. A token inside a message is veiled: it is XORed with an HMAC of the nonce, which is never used
     twice. Who knows the token of the proof lifts the veil.

Where daemons have certificates, one may ask another one of the same user to rebuild a job that the
other one does not know yet. They share no token then, and use CERTIFIED: both have looked at the
other one's certificate.

* Lost: a call or a reply that is lost is a call without an answer; the caller repeats it with a
  new nonce. All calls are safe to repeat.
* Late: a call that arrives after its caller gave up is carried out, if its challenge still counts.
* Repeated: a call that arrives again is refused, at every node. gRPC itself repeats a call only if
  no handler has seen it.

Not covered: the bytes of a stream. They are compared with the digests of the seal, and an attacker
can make other bytes with the same digests. TLS protects against attackers on the way.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from google.protobuf.message import Message

from reft.errors import AttachError
from reft.wire.v1 import daemon_pb2 as pb

JOB_KEY: Final = "reft-job"
CHALLENGE_KEY: Final = "reft-challenge-bin"
NONCE_KEY: Final = "reft-nonce-bin"
DIGEST_KEY: Final = "reft-digest-bin"
PROOF_KEY: Final = "reft-proof-bin"
RANDOM_BYTES: Final = 16  # of a challenge, and of a nonce
NONCES_MAX: Final = 20_000  # of a challenge; some 2 MB
# With this token, which everybody knows, a call proves nothing: certificates stand for it.
CERTIFIED: Final = hashlib.sha256(b"reft: the certificate is the proof").digest()
_NEEDED: Final = "this call needs a proof of the job's token, made for this node and its present challenge."
Metadata = tuple[tuple[str, str | bytes], ...]


class UnprovedCall(AttachError):
    """The caller has not proved that it knows the token."""


@dataclass(frozen=True)
class ProvedCall:
    """One call, as both of its ends know it.

    Attributes:
        token: 32 bytes; the proofs are made with them.
        node: id of the callee's node.
        method: full name of the method.
        job: name of the job.
        challenge: of the callee.
        nonce: of the caller, for this call alone.
        request: SHA-256 of the request's bytes.
    """

    token: bytes = field(repr=False)
    node: str
    method: str
    job: str
    challenge: bytes
    nonce: bytes
    request: bytes

    def metadata(self) -> Metadata:
        """Returns what the call carries."""
        return (
            (JOB_KEY, self.job),
            (CHALLENGE_KEY, self.challenge),
            (NONCE_KEY, self.nonce),
            (DIGEST_KEY, self.request),
            (PROOF_KEY, self.call_proof()),
        )

    def call_proof(self) -> bytes:
        return self._proof("call")

    def reply_proof(self, status: int, reply: bytes) -> bytes:
        """Returns the proof of a reply.

        Args:
            status: number of the gRPC status.
            reply: the reply's bytes, or the text of the error.
        """
        return self._proof("reply", struct.pack("<I", status), digest_of(reply))

    def has_reply(self, metadata: object, status: int, reply: bytes) -> bool:
        """Returns whether `metadata` proves a reply; compares in constant time."""
        return hmac.compare_digest(_bytes_at(PROOF_KEY, values_in(metadata)), self.reply_proof(status, reply))

    def check_request(self, data: bytes) -> None:
        """Checks the request's bytes, when they have arrived.

        Raises:
            UnprovedCall: they are not those that the proof is about.
        """
        if not hmac.compare_digest(digest_of(data), self.request):
            raise UnprovedCall("the request is not the one that the proof was made for.")

    def veil_request(self, request: Message) -> None:
        """Lifts the veil from the tokens in a request."""
        _veil(self.token, self.nonce, "request", request)

    def veil_reply(self, reply: Message) -> None:
        """Veils the tokens in a reply; a second time, it lifts the veil."""
        _veil(self.token, self.nonce, "reply", reply)

    def _proof(self, label: str, *parts: bytes) -> bytes:
        names = (each.encode() for each in (label, self.node, self.method, self.job))
        return _hmac(self.token, *names, self.challenge, self.nonce, self.request, *parts)


def prove_call(
    token: bytes, node: str, method: str, job: str, challenge: bytes, request: Message
) -> tuple[ProvedCall, bytes]:
    """Returns a new call and the bytes of its request.

    Args:
        token: of the job, or of its agents.
        node: id of the callee's node.
        method: full name of the method.
        job: name of the job.
        challenge: the newest one that the callee has told; empty: none yet.
        request: what is asked. It stays as it is.
    """
    nonce = secrets.token_bytes(RANDOM_BYTES)
    if manifests_in(request):
        veiled = type(request)()
        veiled.CopyFrom(request)
        _veil(token, nonce, "request", veiled)
        request = veiled
    data = request.SerializeToString()
    return ProvedCall(token, node, method, job, challenge, nonce, digest_of(data)), data


class Challenges:
    """Judges calls to this process, and accepts each of them once.

    Args:
        node: id of this node.
    """

    def __init__(self, node: str) -> None:
        self._node = node
        # challenge → nonces of the calls proved under it; the newest challenge is the last one
        self._nonces: dict[bytes, set[bytes]] = {}
        self._nobodys_token = secrets.token_bytes(32)
        self._renew()

    @property
    def present(self) -> bytes:
        """The challenge that callers should use."""
        return next(reversed(self._nonces))

    def metadata(self) -> Metadata:
        """Returns what every answer to a call over TCP carries, a refusal too."""
        return ((CHALLENGE_KEY, self.present),)

    def check(self, metadata: object, method: str, tokens: Sequence[bytes]) -> ProvedCall:
        """Returns the call that `metadata` proves. The request itself is not needed for that.

        Args:
            metadata: of the call.
            method: full name of the method.
            tokens: those of which one must be proved; none: nobody may call.

        Raises:
            UnprovedCall: there is no valid proof for this node, or the call was accepted before.
        """
        values = values_in(metadata)
        challenge, nonce, request, proof = (
            _bytes_at(key, values) for key in (CHALLENGE_KEY, NONCE_KEY, DIGEST_KEY, PROOF_KEY)
        )
        nonces = self._nonces.get(challenge)
        if nonces is None or len(nonces) >= 2 * NONCES_MAX or len(nonce) != RANDOM_BYTES:
            raise UnprovedCall(_NEEDED)
        proved = None
        # An unknown job takes as long as a wrong token. An empty token proves nothing.
        for token in [token for token in tokens if token] or [self._nobodys_token]:
            call = ProvedCall(token, self._node, method, job_in(values), challenge, nonce, request)
            if hmac.compare_digest(proof, call.call_proof()):
                proved = call
        if proved is None:
            raise UnprovedCall(_NEEDED)
        if nonce in nonces:
            raise UnprovedCall("this call was made before.")
        nonces.add(nonce)
        if len(self._nonces[self.present]) >= NONCES_MAX:
            self._renew()
        return proved

    def _renew(self) -> None:
        self._nonces[secrets.token_bytes(RANDOM_BYTES)] = set()
        while len(self._nonces) > 2:
            del self._nonces[next(iter(self._nonces))]


def digest_of(data: bytes) -> bytes:
    """Returns what stands for a request or a reply in a proof."""
    return hashlib.sha256(data).digest()


def job_in(metadata: object) -> str:
    """Returns the job that a call over TCP names; empty: none."""
    job = values_in(metadata).get(JOB_KEY, "")
    return job if isinstance(job, str) else ""


def challenge_in(metadata: object) -> bytes:
    """Returns the challenge that an answer tells; empty: none that a call could use."""
    challenge = _bytes_at(CHALLENGE_KEY, values_in(metadata))
    return challenge if len(challenge) == RANDOM_BYTES else b""


def values_in(metadata: object) -> dict[str, str | bytes]:
    """Returns metadata by key; the last value of a key counts."""
    return dict(metadata or ())  # type: ignore[call-overload, no-any-return]


def _bytes_at(key: str, values: Mapping[str, str | bytes]) -> bytes:
    """Returns a value; empty if it is missing or no bytes."""
    value = values.get(key, b"")
    return value if isinstance(value, bytes) else b""


def manifests_in(message: Message) -> list[tuple[int, pb.Manifest]]:
    """Returns the fields of a message that are manifests: their numbers, and the manifests."""
    return [(field.number, value) for field, value in message.ListFields() if isinstance(value, pb.Manifest)]


def _veil(token: bytes, nonce: bytes, direction: str, message: Message) -> None:
    """XORs tokens in a message with bytes that no other call uses."""
    for number, manifest in manifests_in(message):
        secret = [manifest.token, *manifest.earlier_tokens]
        for place, each in enumerate(secret):
            pad = _hmac(token, f"veil {direction}".encode(), nonce, struct.pack("<II", number, place))
            secret[place] = bytes(one ^ other for one, other in zip(each, pad, strict=False))
        manifest.token, manifest.earlier_tokens[:] = secret[0], secret[1:]


def _hmac(token: bytes, *parts: bytes) -> bytes:
    message = b"".join(struct.pack("<I", len(part)) + part for part in parts)
    return hmac.digest(token, message, "sha256")
