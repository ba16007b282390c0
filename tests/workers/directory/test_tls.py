"""A store that wants certificates of its clients."""

import shutil
import subprocess
from pathlib import Path

import pytest
from etcd_cluster import EtcdCluster, etcd_binary

from workers.clock import SystemClock
from workers.core.errors import ConfigError
from workers.directory.address import open_directory
from workers.directory.base import DirectoryUnavailableError, NodeRecord

pytestmark = [pytest.mark.heavy, pytest.mark.xdist_group("etcd")]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ca.pem, node.pem, node.key: of a server and a client on 127.0.0.1."""
    if shutil.which("openssl") is None or etcd_binary() is None:
        pytest.skip("needs openssl and etcd (Debian: apt-get install openssl etcd-server)")
    folder = tmp_path_factory.mktemp("tls")
    (folder / "san").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost")
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    for command in (
        ["req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem", "-days", "2",
         "-subj", "/CN=test-ca"],
        ["req", *key, "-keyout", "node.key", "-out", "node.csr", "-subj", "/CN=127.0.0.1"],
        ["x509", "-req", "-in", "node.csr", "-CA", "ca.pem", "-CAkey", "ca.key",
         "-CAcreateserial", "-out", "node.pem", "-days", "2", "-extfile", "san"],
    ):  # fmt: skip
        subprocess.run(["openssl", *command], cwd=folder, check=True, capture_output=True)
    return folder


async def test_certificates_open_it_and_nothing_else_does(certificates: Path) -> None:
    ca, cert, key = (certificates / name for name in ("ca.pem", "node.pem", "node.key"))
    arguments = ["--cert-file", str(cert), "--key-file", str(key), "--client-cert-auth",
                 "--trusted-ca-file", str(ca)]  # fmt: skip
    with EtcdCluster(1, *arguments, scheme="https") as etcd:
        address = f"{etcd.address}?ca={ca}&cert={cert}&key={key}"
        trusted = open_directory(address, "c", SystemClock())
        await trusted.register(NodeRecord("n1", 1), 30.0)
        assert await trusted.nodes() == [NodeRecord("n1", 1)]
        await trusted.close()
        plain = open_directory(etcd.address, "c", SystemClock())
        with pytest.raises(DirectoryUnavailableError):
            await plain.nodes()
        await plain.close()
        with pytest.raises(ConfigError, match="nowhere"):
            open_directory(f"{etcd.address}?ca=/nowhere.pem", "c", SystemClock())
