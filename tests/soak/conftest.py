"""The model's folder: its tokenizer is what emulated clusters need."""

from pathlib import Path

import pytest

from workers.data_dir import default_data_dir
from workers.models.resolve import resolve_model


@pytest.fixture(scope="session")
def model_folder() -> Path:
    return Path(resolve_model("smollm2", default_data_dir()).source)
