# SPDX-License-Identifier: Apache-2.0
"""A compact trainer with flat buffers and a distributed optimizer, laid out as in Megatron, on
`fsdp_quant.hooks`."""
