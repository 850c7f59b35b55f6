# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: F401
"""Python wrappers of the compiled operators, in one file per domain, as in csrc/api.

`dispatch` and the modules call them (`doctor` calls `supported`). `extension` loads the library. An
operator receives an `Encoding` as one integer (`pack_encoding`); `encoding_shapes` returns the
shapes of the buffers of an encoding. csrc/api/encoding.cpp alone defines the bits of the integer
and what operators allocate.
"""

from ..capability import BLACKWELL, ELEMENTS, HOPPER, unsupported_reason
from .encoding import (
    COMPACT,
    FLOATING,
    OPERAND,
    PIECE_VALUES,
    SCALE_SIDES,
    SWIZZLE,
    SWIZZLE_TRANSPOSED,
    TILE,
    TRANSPOSE_BYTES,
    TRANSPOSE_NIBBLES,
    TRANSPOSED_BITS,
    EncodingShapes,
    encodes,
    encoding_shapes,
    is_available_for,
    is_available_on,
    pack_encoding,
    scale_layout,
    scale_layout_of,
    supported,
)
from .fakes import FAKES, FLOPS
from .gemms import (
    MOST_GROUPS,
    Operand,
    TokenGroups,
    gemm,
    grouped_gemm,
    grouped_gemm_wgrad,
    operand_code,
    packed_counts,
    product_error,
    token_groups,
)
from .layouts import (
    OF_TENSOR,
    OF_TILE,
    RecordedLaunch,
    anchor_codes,
    anchor_run,
    anchor_shape,
    dequantize,
    multi_tensor_anchor,
    multi_tensor_transpose,
    swizzle_scales,
    tensor_decode_scale,
    transpose_codes,
    transpose_stack,
    transpose_tokens,
)
from .norms import (
    WIDEST_NORM,
    activate,
    activation,
    activation_backward,
    amaxes_like,
    new_amaxes,
    norm,
    norm_backward,
)
from .optimizers import AdamStep, adam, adam_codes, adam_count, adam_statistics, adam_takes
from .quantization import (
    RecordedEncode,
    call_of,
    cast_pieces,
    cast_scales,
    column_sums,
    encodes_group,
    multi_tensor_amax,
    multi_tensor_quantize,
    quantize,
    quantize_anchored,
    rows_of,
    statistics,
    unsupported_pieces_reason,
)
from .steps import (
    OperandSpec,
    grouped_step,
    grouped_step_backward,
    linear_counts,
    linear_gated,
    linear_plan,
    linear_step,
    linear_tokens,
    linear_weight,
    operand_spec_of,
    random_key,
    record_amax,
)
