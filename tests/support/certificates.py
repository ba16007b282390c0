"""Authorities and certificates for TLS between nodes, made by the openssl program."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from workers.transfer_tls import TlsFiles


class Authority:
    """One cluster's; `node(name)` is a certificate of it."""

    def __init__(self, folder: Path, name: str) -> None:
        openssl = shutil.which("openssl")
        assert openssl, "the tests need the openssl program"
        self._openssl = openssl
        self._folder = folder / name
        self._folder.mkdir(parents=True)
        self.cert, self.key = self._folder / "ca.pem", self._folder / "ca-key.pem"
        self._make(
            "-x509", "-keyout", str(self.key), "-out", str(self.cert), "-subj", f"/CN={name}"
        )

    def node(self, name: str) -> TlsFiles:
        cert, key = self._folder / f"{name}.pem", self._folder / f"{name}-key.pem"
        self._make(
            "-x509", "-CA", str(self.cert), "-CAkey", str(self.key), "-keyout", str(key),
            "-out", str(cert), "-subj", f"/CN={name}",
            "-addext", "basicConstraints=critical,CA:FALSE",
        )  # fmt: skip
        key.chmod(0o600)
        return TlsFiles(cert, key, self.cert)

    def _make(self, *arguments: str) -> None:
        command = [
            self._openssl, "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
            "-days", "30", *arguments,
        ]  # fmt: skip
        subprocess.run(command, check=True, capture_output=True, timeout=60)
