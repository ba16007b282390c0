"""The data folder and its token."""

import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from workers.core.errors import ConfigError
from workers.data_dir import default_data_dir
from workers.supervisor.home import Home, default_cluster_name, ensure_token


def test_token_is_private_and_stays(tmp_path: Path) -> None:
    path = tmp_path / "token"
    token = ensure_token(path)
    assert len(token) >= 32
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert ensure_token(path) == token
    assert [each.name for each in tmp_path.iterdir()] == ["token"]


def test_all_who_come_at_once_get_the_same_token(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        tokens = set(pool.map(ensure_token, [tmp_path / "token"] * 32))
    assert len(tokens) == 1


@pytest.mark.parametrize(
    "content", [b"\n", b"short", b"two\nlines" * 4, b"\xff\xfe", b"\xc3\xbc" * 20]
)
def test_a_file_without_a_token_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "token").write_bytes(content)
    with pytest.raises(ConfigError, match=r"holds no token.*Remove it"):
        ensure_token(tmp_path / "token")


def test_a_token_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "token").mkdir()
    with pytest.raises(ConfigError, match="cannot be used"):
        ensure_token(tmp_path / "token")


def test_a_folder_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run" / "supervisor.lock").mkdir(parents=True)  # opening it fails, for root too
    with pytest.raises(ConfigError, match=r"--data.*cannot be used \(.*supervisor.lock"):
        Home(tmp_path).create()
    monkeypatch.setattr("os.access", lambda path, _mode: not str(path).endswith("logs"))
    with pytest.raises(ConfigError, match=r"--data.*cannot be used \(.*/logs: cannot be written"):
        Home(tmp_path).create()


def test_a_path_too_long_for_a_socket_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="too long"):
        Home(tmp_path / ("x" * 100)).create()
    assert list(tmp_path.iterdir()) == []


def test_folders_are_private(tmp_path: Path) -> None:
    home = Home(tmp_path / "p")
    home.create()
    assert all(stat.S_IMODE(each.stat().st_mode) == 0o700 for each in (home.data, home.run))


def test_clusters_of_different_folders_have_different_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PERILUNE_HOME", raising=False)
    assert default_cluster_name(default_data_dir()) == "local"
    names = {default_cluster_name(tmp_path / name) for name in "ab"}
    assert len(names) == 2
    monkeypatch.setenv("PERILUNE_HOME", str(tmp_path / "a"))
    assert default_cluster_name(default_data_dir()) in names
