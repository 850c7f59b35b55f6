# SPDX-License-Identifier: Apache-2.0
"""The former path of `fsdp_quant.integrations.megatron.gather`."""

from .megatron.gather import gather_codes, shard_map

__all__ = ["gather_codes", "shard_map"]
