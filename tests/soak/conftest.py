"""The model's folder: its tokenizer is what emulated clusters need."""

from pathlib import Path

import pytest

from workers.models.resolve import default_data_folder, resolve_model


@pytest.fixture(scope="session")
def model_folder() -> Path:
    return Path(resolve_model("smollm2", default_data_folder()).source)
