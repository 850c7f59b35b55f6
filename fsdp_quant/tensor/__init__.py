"""Tensor subclasses: `QuantizedTensor` (codes and scales) and `WeightShard` (what FSDP2 shards and gathers as codes)."""
