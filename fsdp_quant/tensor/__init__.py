# SPDX-License-Identifier: Apache-2.0
"""Tensor subclasses: `QuantizedTensor` (codes and scales) and `WeightShard` (what FSDP2 shards and
gathers as codes)."""
