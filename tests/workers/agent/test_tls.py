"""Agents that speak TLS with one another, and what those hear that do not fit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from certificates import Authority
from fetching import Node, check_bytes, fetch, settled, store

from workers.client import AgentClient
from workers.core.errors import RefusedError
from workers.core.hashing import block_hashes, namespace_digest, root_hash
from workers.core.messages import Done
from workers.core.stats_messages import NamespaceSpec
from workers.core.transfer_messages import Push
from workers.transfer_tls import TlsFiles

Eventually = Callable[[Callable[[], bool]], None]
MakePair = Callable[..., tuple[Node, Node]]


@pytest.fixture
def make_pair(make_node: Callable[..., Node]) -> MakePair:
    def make(*files: TlsFiles | None) -> tuple[Node, Node]:
        nodes = []
        for name, tls in zip(("n1", "n2"), files, strict=True):
            given = [] if tls is None else [
                "--transfer-tls-cert", str(tls.cert), "--transfer-tls-key", str(tls.key),
                "--transfer-tls-ca", str(tls.ca),
            ]  # fmt: skip
            nodes.append(make_node(name, "tcp", *given, slab_bytes=4 << 20))
        return nodes[0], nodes[1]

    return make


@pytest.fixture
def chain(spec: NamespaceSpec) -> tuple[bytes, list[bytes]]:
    namespace = namespace_digest(spec)
    keys = block_hashes(root_hash(namespace, None, None), list(range(64 * 16)), 64)
    return namespace, [bytes(key) for key in keys]


def test_blocks_are_pulled_and_pushed_under_tls(
    make_pair: MakePair,
    chain: tuple[bytes, list[bytes]],
    spec: NamespaceSpec,
    tmp_path: Path,
    eventually: Eventually,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    authority = Authority(tmp_path, "cluster")
    files = authority.node("n1")
    one, two = make_pair(files, authority.node("n2"))
    assert f"tcp+tls:127.0.0.1:{one.port}" in one.agent.log
    namespace, keys = chain
    store(one, namespace, keys, spec.block_bytes)
    fetch(two, one.holder, namespace, keys[:8])
    assert settled(two, namespace, keys[:8]).num_held == 8
    one.client.call(Push("transfer:t", namespace, keys, two.holder), Done)
    eventually(lambda: two.client.lookup(namespace, keys).num_held == 16)
    check_bytes(two, namespace, keys)
    plain = AgentClient(one.holder.endpoint, one.agent.hello("cli", "x"))
    with pytest.raises(RefusedError, match="this connection came without TLS"):
        plain.connect()
    plain.close()
    for part in ("cert", "key", "ca"):
        monkeypatch.setenv(f"PERILUNE_TRANSFER_TLS_{part.upper()}", str(getattr(files, part)))
    knowing = AgentClient(one.holder.endpoint, one.agent.hello("cli", "x"), timeout_seconds=20.0)
    assert knowing.connect().node_id == "n1"
    assert knowing.connect().node_id == "n1"
    knowing.close()


def test_one_side_without_tls_gets_nothing_and_both_say_why(
    make_pair: MakePair,
    chain: tuple[bytes, list[bytes]],
    spec: NamespaceSpec,
    tmp_path: Path,
    eventually: Eventually,
) -> None:
    files = Authority(tmp_path, "cluster").node("n1")
    one, two = make_pair(files, None)
    namespace, keys = chain
    store(one, namespace, keys[:4], spec.block_bytes)
    fetch(two, one.holder, namespace, keys[:4])
    assert settled(two, namespace, keys[:4]).num_held == 0
    eventually(lambda: f"n1 asks for TLS with certificate {files.cert}" in two.agent.log)
    fetch(one, two.holder, namespace, keys[:8])
    assert settled(one, namespace, keys[:8]).num_held == 4
    eventually(lambda: f"this side uses TLS with certificate {files.cert}" in one.agent.log)


def test_certificates_of_two_authorities_do_not_meet(
    make_pair: MakePair,
    chain: tuple[bytes, list[bytes]],
    spec: NamespaceSpec,
    tmp_path: Path,
    eventually: Eventually,
) -> None:
    mine, other = Authority(tmp_path, "cluster"), Authority(tmp_path, "stranger")
    one, two = make_pair(mine.node("n1"), other.node("n2"))
    namespace, keys = chain
    store(one, namespace, keys[:4], spec.block_bytes)
    fetch(two, one.holder, namespace, keys[:4])
    assert settled(two, namespace, keys[:4]).num_held == 0
    eventually(lambda: "certificate verify failed" in two.agent.log)
    assert str(other.cert) in two.agent.log
