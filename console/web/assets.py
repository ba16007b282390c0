"""Static files under one content hash: a changed file has a new address, so caches never lie."""

import gzip
import hashlib
from dataclasses import dataclass, field
from pathlib import Path

STATIC = Path(__file__).parent / "static"
_TYPES = {
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
    ".md": "text/plain; charset=utf-8",
}


@dataclass(frozen=True, slots=True)
class Asset:
    """One file's bytes, as they are and gzipped."""

    media_type: str
    body: bytes
    gzipped: bytes


@dataclass(slots=True)
class Assets:
    """The files of `folder`, read on first use; `digest` covers all names and bytes."""

    folder: Path = STATIC
    digest: str = ""
    _loaded: dict[str, Asset] = field(default_factory=dict)

    def __post_init__(self) -> None:
        tree = hashlib.sha256()
        for path in sorted(self.folder.iterdir()):
            tree.update(path.name.encode() + b"\0")
            tree.update(hashlib.sha256(path.read_bytes()).digest())
        self.digest = tree.hexdigest()[:16]

    def url(self, name: str) -> str:
        """Address of a file; raises FileNotFoundError for a name that is not there."""
        if not (self.folder / name).is_file():
            raise FileNotFoundError(name)
        return f"/static/{self.digest}/{name}"

    def get(self, digest: str, name: str) -> Asset | None:
        """None for another digest (an old page) or an unknown name."""
        path = self.folder / name
        if digest != self.digest or path.parent != self.folder or not path.is_file():
            return None
        if name not in self._loaded:
            body = path.read_bytes()
            media_type = _TYPES.get(path.suffix, "application/octet-stream")
            self._loaded[name] = Asset(media_type, body, gzip.compress(body, 6, mtime=0))
        return self._loaded[name]
