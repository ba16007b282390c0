"""Blocks under TLS with a certificate at both ends, and everything that does not fit together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from certificates import Authority

from workers.core.errors import ConfigError
from workers.core.transfer_types import Cause, Direction
from workers.transfer.base import DownBy, PeerAddress
from workers.transfer.tcp import TcpTransport
from workers.transfer.tcp_server import TcpServer
from workers.transfer_tls import TlsFiles, client_context, find_tls, server_context, tls_files

SECRET = b"s" * 32
Rig = Any


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"), "cluster")


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"), "stranger")


@pytest.fixture
def rig(make_rig: Callable[[str], Rig]) -> Rig:
    return make_rig("tcp")


def connect(rig: Rig, holder: TlsFiles | None, reader: TlsFiles | None) -> Any:
    server = TcpServer(
        rig.holder, "holder", SECRET, push=rig.push,
        tls=None if holder is None else server_context(holder), tls_name=str(holder),
    )  # fmt: skip
    rig.servers.append(server)
    transport = TcpTransport(
        rig.reader, "reader", SECRET,
        tls=None if reader is None else client_context(reader), tls_name=str(reader),
    )  # fmt: skip
    address = {"tcp": f"127.0.0.1:{server.address[1]}"}
    rig.endpoints.append(transport.connect(PeerAddress("holder", address, 77), 77))
    return rig.endpoints[-1]


def refusal(rig: Rig, holder: TlsFiles | None, reader: TlsFiles | None) -> str:
    endpoint = connect(rig, holder, reader)
    report = rig.wait(endpoint, lambda seen: seen.down is not None)
    down: DownBy = report.down
    assert report.opened is None
    assert down.cause is Cause.REFUSED, down
    return down.text


def test_blocks_are_read_and_written(rig: Rig, authority: Authority, op: Any) -> None:
    blocks = rig.fill(*range(10))
    endpoint = connect(rig, authority.node("n1"), authority.node("n2"))
    rig.wait(endpoint, lambda seen: seen.opened is not None)
    done = rig.finish(endpoint, [op(index, index) for index in range(10)])
    assert {completion.cause for completion in done.values()} == {None}
    assert {index: rig.local(index) for index in range(10)} == blocks
    key = (4).to_bytes(16, "little")
    rig.reader.slab.write_block(4, 9, key, blocks[4])
    rig.push.reserve(20, 3, key, len(blocks[4]))
    done = rig.finish(endpoint, [op(99, 4, Direction.PUSH, remote_slot=20)])
    assert done[99].cause is None
    assert rig.holder.slab.read_block(20, 3, key) == blocks[4]


def test_a_plain_reader_is_told_what_the_holder_wants(rig: Rig, authority: Authority) -> None:
    files = authority.node("n1")
    text = refusal(rig, files, None)
    assert str(files.cert) in text
    assert "this connection came without TLS" in text
    assert "--transfer-tls-cert" in text


def test_a_plain_holder_is_named_beside_what_this_side_uses(rig: Rig, authority: Authority) -> None:
    files = authority.node("n2")
    text = refusal(rig, None, files)
    assert str(files.cert) in text
    assert "holder at 127.0.0.1" in text
    assert "answers without TLS" in text


def test_a_holder_of_another_authority_is_not_believed(
    rig: Rig, authority: Authority, stranger: Authority
) -> None:
    files = authority.node("n2")
    text = refusal(rig, stranger.node("n1"), files)
    assert str(files.ca) in text
    assert "certificate verify failed" in text


def test_a_reader_of_another_authority_is_not_let_in(
    rig: Rig, authority: Authority, stranger: Authority
) -> None:
    shown = stranger.node("n2")
    trusting = TlsFiles(shown.cert, shown.key, authority.cert)
    text = refusal(rig, authority.node("n1"), trusting)
    assert str(shown.cert) in text
    assert "does not accept it" in text


class TestFiles:
    def test_all_three_or_none(self, tmp_path: Path) -> None:
        assert tls_files(None, None, None) is None
        with pytest.raises(ConfigError, match="transfer_tls_ca"):
            tls_files(tmp_path, tmp_path, None)

    def test_a_key_that_others_may_read(self, authority: Authority) -> None:
        files = authority.node("open")
        files.key.chmod(0o644)
        with pytest.raises(ConfigError, match=r"mode is 0644.*chmod 600"):
            server_context(files)

    def test_a_file_that_is_none(self, authority: Authority, tmp_path: Path) -> None:
        files = authority.node("broken")
        files.cert.write_text("no certificate")
        with pytest.raises(ConfigError, match=r"broken\.pem"):
            client_context(files)
        whole = authority.node("whole")
        gone = TlsFiles(whole.cert, whole.key, tmp_path / "gone.pem")
        with pytest.raises(ConfigError, match=r"gone\.pem"):
            client_context(gone)

    def test_by_environment_or_folder(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert find_tls(tmp_path) is None
        (tmp_path / "transfer-tls").mkdir()
        found = find_tls(tmp_path)
        assert found is not None
        assert found.ca == tmp_path / "transfer-tls" / "ca.pem"
        monkeypatch.setenv("PERILUNE_TRANSFER_TLS_CERT", "/a")
        with pytest.raises(ConfigError, match="transfer_tls_key"):
            find_tls(tmp_path)
