from __future__ import annotations

import os

import pytest

from workers.models import manifest
from workers.models.manifest import Manifest


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "weights").write_bytes(b"abc")
    (tmp_path / "config").write_bytes(b"{}")
    files = manifest.describe(tmp_path, ["config", "weights"])
    manifest.write(tmp_path, Manifest("m", "p==1", "00", "v", files))
    return tmp_path


class TestManifest:
    def test_what_was_written_has_no_problem(self, folder):
        found = manifest.read(folder)
        assert found is not None
        assert found.weights_version == "v"
        assert manifest.problem_of(folder, found) == ""
        assert manifest.problem_of(folder, found, full=True) == ""

    def test_missing_file(self, folder):
        (folder / "config").unlink()
        assert manifest.problem_of(folder, manifest.read(folder)) == "config is missing"

    def test_other_size_names_both(self, folder):
        (folder / "weights").write_bytes(b"abcd")
        problem = manifest.problem_of(folder, manifest.read(folder))
        assert problem == "weights has 4 bytes, not 3"

    def test_same_size_other_content(self, folder):
        (folder / "weights").write_bytes(b"xyz")
        os.utime(folder / "weights", ns=(1, 1))
        assert "weights has sha256" in manifest.problem_of(folder, manifest.read(folder))

    def test_full_check_finds_a_change_behind_the_old_time(self, folder):
        before = (folder / "weights").stat()
        (folder / "weights").write_bytes(b"xyz")
        os.utime(folder / "weights", ns=(before.st_atime_ns, before.st_mtime_ns))
        found = manifest.read(folder)
        assert manifest.problem_of(folder, found) == ""
        assert "weights has sha256" in manifest.problem_of(folder, found, full=True)

    @pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"format": 99}'])
    def test_no_manifest_that_we_understand(self, folder, content):
        (folder / manifest.MANIFEST_NAME).write_bytes(content)
        assert manifest.read(folder) is None
