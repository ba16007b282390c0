"""What a model's folder says of its geometry, for predictions before the first measurement."""

from pathlib import Path

import msgspec

from workers.core.disaggregation import Geometry, geometry_of

MAX_CONFIG_BYTES = 1 << 20


def read_geometry(folder: str) -> Geometry | None:
    """From its config.json; None where there is none, or it says too little. Blocking."""
    try:
        with (Path(folder) / "config.json").open("rb") as file:
            config = msgspec.json.decode(file.read(MAX_CONFIG_BYTES))
    except (OSError, msgspec.DecodeError):
        return None
    return geometry_of(config) if isinstance(config, dict) else None
