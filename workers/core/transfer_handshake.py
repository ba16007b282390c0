"""Who may read whose slots. Bytes in, bytes out; nonces are arguments.

    initiator                                responder
    Greeting(node, nonce)              ->
                                       <-    Challenge(node, incarnation, nonce, proof)
    Answer(proof, facts, incarnation)  ->
                                       <-    Accepted(facts, depth)  or  Refused(code, text)

Both sides prove that they know the cluster secret, by blake3 keyed with it over everything that
both said; roles are part of it, so that a proof cannot be reflected. Facts (hashing, slab layout,
namespace geometry) are compared on both sides. Without TLS the bytes after it are neither secret
nor protected against someone on the path: checksums guard against accidents, not against attacks.
"""

from __future__ import annotations

from hmac import compare_digest
from typing import Final

import msgspec
from blake3 import blake3

from workers.core.errors import ProtocolError, RefusedError
from workers.core.hashing import PUBLISHED_TEST_VECTOR
from workers.core.messages import Refused

TRANSFER_PROTOCOL: Final = 1
SECRET_BYTES: Final = 32
NONCE_BYTES: Final = 32
MAX_HANDSHAKE_BYTES: Final = 64 * 1024
_DOMAIN: Final = b"perilune/transfer/handshake/1\0"
_FINGERPRINT: Final = b"perilune/transfer/fingerprint/1\0"


class SlabFacts(msgspec.Struct, frozen=True):
    """What two nodes must agree on before slots move. `namespaces`: digest -> bytes of a block."""

    slot_bytes: int
    header_bytes: int
    num_slots: int
    namespaces: dict[bytes, int] = {}
    hash_vector: bytes = PUBLISHED_TEST_VECTOR
    slot_format: int = 1


class Greeting(msgspec.Struct, tag=True, frozen=True):
    node_id: str
    nonce: bytes
    fingerprint: str
    protocol: int = TRANSFER_PROTOCOL


class Challenge(msgspec.Struct, tag=True, frozen=True):
    node_id: str
    incarnation: int
    nonce: bytes
    fingerprint: str
    proof: bytes
    protocol: int = TRANSFER_PROTOCOL


class Answer(msgspec.Struct, tag=True, frozen=True):
    proof: bytes
    facts: SlabFacts
    incarnation: int  # that the initiator means; 0: whichever answers


class Accepted(msgspec.Struct, tag=True, frozen=True):
    facts: SlabFacts
    depth: int  # ops that the responder takes at once
    extra: dict[str, bytes] = {}  # a transport's own: remote keys and addresses, say


_Message = Greeting | Challenge | Answer | Accepted | Refused
_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(_Message)


def fingerprint(secret: bytes) -> str:
    """Names a secret without giving it away."""
    return blake3(_FINGERPRINT, key=secret).hexdigest(8)


class Initiator:
    """The side that connects. `RefusedError` from `receive` ends it."""

    def __init__(
        self, secret: bytes, node_id: str, facts: SlabFacts, nonce: bytes, incarnation: int = 0
    ) -> None:
        self._secret = secret
        self._facts = facts
        self._wanted = incarnation
        self._greeting = Greeting(node_id, nonce, fingerprint(secret))
        self.peer = ""
        self.incarnation = 0
        self.accepted: Accepted | None = None

    def start(self) -> bytes:
        return _encoder.encode(self._greeting)

    def receive(self, document: bytes) -> bytes | None:
        """The next document to send, or None when it is done. RefusedError, ProtocolError."""
        match _decode(document):
            case Refused(code, message):
                raise RefusedError(code, message)
            case Challenge() as challenge if not self.peer:
                return self._answer(challenge)
            case Accepted() as accepted if self.peer:
                _raise(check_facts(self._facts, accepted.facts, "this node", self.peer))
                self.accepted = accepted
                return None
            case other:
                raise ProtocolError(f"handshake: {type(other).__name__} was not expected")

    def _answer(self, challenge: Challenge) -> bytes:
        mine = self._greeting
        _raise(_check_protocol(mine.protocol, challenge.protocol, challenge.node_id))
        _raise(_check_fingerprint(mine.fingerprint, challenge.fingerprint, challenge.node_id))
        expected = _proof(self._secret, b"responder", mine, challenge, b"")
        if not compare_digest(challenge.proof, expected):
            raise RefusedError("secret", f"{challenge.node_id} did not prove the cluster secret")
        if self._wanted and challenge.incarnation != self._wanted:
            raise StaleIncarnationError(challenge.node_id, self._wanted, challenge.incarnation)
        self.peer, self.incarnation = challenge.node_id, challenge.incarnation
        rest = _encoder.encode((self._facts, self._wanted))
        proof = _proof(self._secret, b"initiator", mine, challenge, rest)
        return _encoder.encode(Answer(proof, self._facts, self._wanted))


class Responder:
    """The side that is connected to. After a reply with `refused` set, close."""

    def __init__(
        self,
        secret: bytes,
        node_id: str,
        incarnation: int,
        facts: SlabFacts,
        nonce: bytes,
        *,
        depth: int = 1024,
        extra: dict[str, bytes] | None = None,
    ) -> None:
        self._secret = secret
        self._node_id = node_id
        self._incarnation = incarnation
        self._nonce = nonce
        self._accepted = Accepted(facts, depth, extra or {})
        self._greeting: Greeting | None = None
        self._challenge: Challenge | None = None
        self.peer = ""
        self.done = False
        self.refused: Refused | None = None

    def receive(self, document: bytes) -> bytes:
        """What to send back. ProtocolError: this is no handshake."""
        match _decode(document):
            case Greeting() as greeting if self._greeting is None:
                return self._greet(greeting)
            case Answer() as answer if self._challenge is not None and not self.done:
                return self._judge(answer)
            case other:
                raise ProtocolError(f"handshake: {type(other).__name__} was not expected")

    def _greet(self, greeting: Greeting) -> bytes:
        refused = _check_protocol(TRANSFER_PROTOCOL, greeting.protocol, greeting.node_id)
        if refused is None:
            mine = fingerprint(self._secret)
            refused = _check_fingerprint(mine, greeting.fingerprint, greeting.node_id)
        if refused is None and len(greeting.nonce) != NONCE_BYTES:
            raise ProtocolError(f"handshake: a nonce of {len(greeting.nonce)} bytes")
        if refused is not None:
            return self._refuse(refused)
        self._greeting = greeting
        bare = Challenge(
            self._node_id, self._incarnation, self._nonce, fingerprint(self._secret), b""
        )
        proof = _proof(self._secret, b"responder", greeting, bare, b"")
        self._challenge = msgspec.structs.replace(bare, proof=proof)
        return _encoder.encode(self._challenge)

    def _judge(self, answer: Answer) -> bytes:
        assert self._greeting is not None
        assert self._challenge is not None
        name = self._greeting.node_id
        rest = _encoder.encode((answer.facts, answer.incarnation))
        proof = _proof(self._secret, b"initiator", self._greeting, self._challenge, rest)
        if not compare_digest(answer.proof, proof):
            return self._refuse(Refused("secret", f"{name} did not prove the cluster secret"))
        if answer.incarnation not in (0, self._incarnation):
            error = StaleIncarnationError(self._node_id, answer.incarnation, self._incarnation)
            return self._refuse(Refused(error.code, str(error)))
        refused = check_facts(self._accepted.facts, answer.facts, self._node_id, name)
        if refused is not None:
            return self._refuse(refused)
        self.peer, self.done = name, True
        return _encoder.encode(self._accepted)

    def _refuse(self, refused: Refused) -> bytes:
        self.refused = refused
        return _encoder.encode(refused)


class StaleIncarnationError(RefusedError):
    """Another process than the one meant answers at this address (C09)."""

    def __init__(self, node_id: str, wanted: int, actual: int) -> None:
        super().__init__(
            "incarnation",
            f"{node_id} is incarnation {actual}, asked for was {wanted}: it has started anew, and "
            "what it held before is void",
        )
        self.actual = actual


def check_facts(mine: SlabFacts, theirs: SlabFacts, me: str, them: str) -> Refused | None:
    """What two slabs must agree on, else both values and the way out."""
    if mine.hash_vector != theirs.hash_vector:
        return Refused(
            "hash_vector",
            f"{me} and {them} compute different block keys: test vectors {mine.hash_vector.hex()} "
            f"and {theirs.hash_vector.hex()}. Run the same release on both nodes.",
        )
    if not mine.slot_bytes or not theirs.slot_bytes:
        return Refused(
            "geometry_unknown",
            f"slots of {me} have {mine.slot_bytes} bytes, of {them} {theirs.slot_bytes}: a node "
            "has no slots until its first worker has joined. Try again then.",
        )
    for name in ("slot_format", "header_bytes", "slot_bytes"):
        ours, other = getattr(mine, name), getattr(theirs, name)
        if ours != other:
            return Refused(
                "slab_layout",
                f"{name} is {ours} at {me} and {other} at {them}. Serve the same model with the "
                "same block size on both nodes.",
            )
    return _check_namespaces(mine, theirs, me, them)


def _check_namespaces(mine: SlabFacts, theirs: SlabFacts, me: str, them: str) -> Refused | None:
    common = mine.namespaces.keys() & theirs.namespaces.keys()
    for digest in sorted(common):
        ours, other = mine.namespaces[digest], theirs.namespaces[digest]
        if ours != other:
            return Refused(
                "geometry",
                f"a block of namespace {digest.hex()} has {ours} bytes at {me}, {other} at {them}",
            )
    if mine.namespaces and theirs.namespaces and not common:
        return Refused(
            "namespace",
            f"{me} serves namespaces {_names(mine)}, {them} {_names(theirs)}: nothing of one can "
            "ever be used by the other. Use the same model, weights version, dtype and layout.",
        )
    return None


def _names(facts: SlabFacts) -> str:
    names = sorted(digest.hex()[:12] for digest in facts.namespaces)
    return ", ".join(names[:4]) + (" ..." if len(names) > 4 else "")


def _check_protocol(mine: int, theirs: int, them: str) -> Refused | None:
    if mine == theirs:
        return None
    return Refused(
        "transfer_protocol",
        f"this node speaks transfer protocol {mine}, {them} {theirs}. Run the same release on both.",
    )


def _check_fingerprint(mine: str, theirs: str, them: str) -> Refused | None:
    if mine == theirs:
        return None
    return Refused(
        "secret",
        f"the cluster secret here has fingerprint {mine}, that of {them} {theirs}. Copy the file "
        "`transfer-secret` from one node's data folder to the other's.",
    )


def _proof(
    secret: bytes, role: bytes, greeting: Greeting, challenge: Challenge, rest: bytes
) -> bytes:
    said = (
        role, greeting.protocol, greeting.node_id, greeting.nonce,
        challenge.protocol, challenge.node_id, challenge.incarnation, challenge.nonce, rest,
    )  # fmt: skip
    return blake3(_DOMAIN + _encoder.encode(said), key=secret).digest()


def _decode(document: bytes) -> _Message:
    try:
        return _decoder.decode(document)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"no handshake of ours: {error}") from error


def _raise(refused: Refused | None) -> None:
    if refused is not None:
        raise RefusedError(refused.code, refused.message)
