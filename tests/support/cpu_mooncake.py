"""Upstream's MooncakeConnector for an engine without an accelerator, where one call that it makes at
its start raises ("Cannot access accelerator device when none is available"); the rest is unchanged.

For the engine's process alone: `"kv_connector_module_path": "cpu_mooncake"`.
"""

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector import (
    MooncakeConnector,
)

__all__ = ["MooncakeConnector"]

torch.accelerator.current_device_index = lambda: 0
