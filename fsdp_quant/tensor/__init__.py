"""Tensor subclasses: `QuantizedTensor` (codes and scales) and `MasterWeight` (what FSDP2 shards)."""
