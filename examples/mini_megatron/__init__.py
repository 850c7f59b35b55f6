# SPDX-License-Identifier: Apache-2.0
"""A compact trainer with flat buffers and a distributed optimizer, as Megatron lays them out, on
`fsdp_quant.hooks`."""
