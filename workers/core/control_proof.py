"""Proofs that both ends of an agent's TCP connection know the cluster secret. Pure.

blake3 keyed with the secret, over what both have said; the role is part of it, so that a proof
cannot be sent back to whom it came from.
"""

from __future__ import annotations

from hmac import compare_digest
from typing import Final

import msgspec
from blake3 import blake3

from workers.core.messages import Hello
from workers.core.transfer_messages import Challenge

NONCE_BYTES: Final = 32
_DOMAIN: Final = b"perilune/agent/handshake/1\0"
_encode: Final = msgspec.msgpack.Encoder().encode


def challenge(secret: bytes, hello: Hello, node_id: str, nonce: bytes, name: str) -> Challenge:
    """The agent's answer to a `Hello`. `name` is the secret's fingerprint, `nonce` its own."""
    return Challenge(node_id, nonce, name, _proof(secret, b"agent", hello, node_id, nonce))


def agent_proved(secret: bytes, hello: Hello, said: Challenge) -> bool:
    """Is this challenge from someone who knows the secret?"""
    expected = _proof(secret, b"agent", hello, said.node_id, said.nonce)
    return compare_digest(said.proof, expected)


def client_proof(secret: bytes, hello: Hello, said: Challenge) -> bytes:
    return _proof(secret, b"client", hello, said.node_id, said.nonce)


def client_proved(secret: bytes, hello: Hello, said: Challenge, proof: bytes) -> bool:
    return compare_digest(proof, client_proof(secret, hello, said))


def _proof(secret: bytes, role: bytes, hello: Hello, node_id: str, nonce: bytes) -> bytes:
    said = _encode((role, hello, node_id, nonce))
    return blake3(_DOMAIN + said, key=secret).digest()
