# SPDX-License-Identifier: Apache-2.0
"""`gemm`: the one place where storages are unpacked into a matrix product.

Every product is NT in its storages' own axes: a storage presents [outer, contraction] whatever its
direction, so

    y  = gemm(x.rowwise,     w.rowwise)       [M, K] x [N, K] -> [M, N]
    dx = gemm(dy.rowwise,    w.columnwise)    [M, N] x [K, N] -> [M, K]
    dw = gemm(dy.columnwise, x.columnwise)    [N, M] x [K, M] -> [N, K]
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .counters import counters
from .encoded_matrix import EncodedMatrix
from .encoded_matrix import StaleWeightError as StaleWeightError
from .formats import COLUMNWISE, IDENTITY, ROWWISE, Direction, check_pair
from .ops import dispatch, native, opaque
from .ops.capability import DOMAINS, arch_of, gemm_domain, has_own_kernels, operand_layout
from .ops.layout import ANCHORED, ANCHORS
from .storage import Storage, to_layout, to_storage


class Epilogue(NamedTuple):
    """Applied to a product in fp32: times alpha, plus bias, rounded once to out_dtype."""

    out_dtype: torch.dtype
    bias: Tensor | None
    alpha: Tensor | None

    def apply(self, product: Tensor, a_scale: Tensor | None, b_scale: Tensor | None) -> Tensor:
        """The result; scales: of rows or tensors, which multiply first (their own product, if both
        are of a tensor)."""
        y = product.float()
        if a_scale is not None and b_scale is not None and a_scale.numel() == b_scale.numel() == 1:
            a_scale, b_scale = a_scale * b_scale, None
        if a_scale is not None:
            y = y * a_scale[:, None]
        if b_scale is not None:
            y = y * b_scale
        if self.alpha is not None:
            y = y * self.alpha
        if self.bias is not None:
            y = y + self.bias.float()
        return y.to(self.out_dtype)


def gemm(
    a: EncodedMatrix,
    b: EncodedMatrix,
    *,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    accumulate: bool = False,
    bias: Tensor | None = None,
    alpha: Tensor | None = None,
    out_amax: Tensor | None = None,
    domain: str | None = None,
    watch: native.Watch | None = None,
    batch_invariant: bool = False,
) -> Tensor:
    """alpha * a b^T + bias, with a [outer_a, contraction] and b [outer_b, contraction].

    a, b:        others than those in the layout of the domain are brought into it.
    out_dtype:   dtype of the result (default: that of `out`, else a's).
    out:         written instead of a new tensor; with accumulate=True added to, in out's dtype.
    bias:        [outer_b].
    alpha:       fp32 scalar tensor.
    out_amax:    fp32 [1]: raised to the largest magnitude of the result.
    domain:      "native", "anchored", "bf16" or "reference" (default: the fastest that computes
                 this pair here).
    watch:       of a product of codes, `native.Watch`; None: nobody asks what it lost.
    batch_invariant:  bits of a row of the result depend on that row of a and on b, and not on
                 how many rows a has (`fq.numerics.batch_invariant`).
    returns:     [outer_a, outer_b].

    Raises ValueError for contractions that differ, a rotation on one operand only, an unknown
    domain, or a domain that cannot compute the pair; StaleWeightError for freed codes.

    >>> quantizer = fq.Quantizer("mxfp8")
    >>> a, b = (quantizer.quantize(torch.randn(rows, 64)).rowwise for rows in (4, 8))
    >>> fq.gemm(a, b).shape
    torch.Size([4, 8])
    """
    if not (isinstance(a, EncodedMatrix) and isinstance(b, EncodedMatrix)):
        raise TypeError(f"gemm wants codes of a direction, as x.rowwise, got {type(a)}, {type(b)}")
    check_pair("gemm", a.fmt, b.fmt, "a", "b")
    a, b = a.readable("gemm operand a"), b.readable("gemm operand b")
    m, n, k = _checked_sizes(a, b, out, accumulate)
    arch = arch_of(a.data.device)
    domain = _domain_of(a, b, arch, batch_invariant) if domain is None else domain
    out_dtype = out_dtype or (out.dtype if out is not None else a.dtype)
    epilogue = Epilogue(out_dtype, bias, alpha)
    is_of_codes = domain in ("native", "anchored") and (a.fmt.is_quantized or b.fmt.is_quantized)
    if domain not in DOMAINS:
        raise ValueError(f"unknown GEMM domain {domain!r}; known domains: {', '.join(DOMAINS)}")
    facts = a.fmt, b.fmt, a.dtype, arch
    if is_of_codes and gemm_domain(*facts, batch_invariant=batch_invariant)[0] != domain:
        raise ValueError(
            f"no compiled kernel multiplies {a.fmt} by {b.fmt} here in the {domain} domain "
            f"({arch}, batch_invariant={batch_invariant}); use the bf16 or reference domain"
        )
    if is_of_codes and m * n * k > 0:
        anchored = next((s.layout for s in (a, b) if s.layout in ANCHORS), ANCHORED)
        left = to_layout(a, operand_layout(a.fmt, b.fmt, domain, arch, anchored))
        right = to_layout(b, operand_layout(b.fmt, a.fmt, domain, arch, anchored))
        result = _multiply(left, right, out, accumulate, epilogue, watch, batch_invariant)
    else:
        if is_of_codes:  # an empty product
            result = _reference(a, b, epilogue)
        else:
            storages = to_storage(a), to_storage(b)
            result = _decoded_product(*storages, epilogue, domain, batch_invariant)
        if out is not None:
            result = out.add_(result) if accumulate else out.copy_(result)
    counters.add("gemm", (domain, repr(a.fmt), repr(b.fmt)))
    if out_amax is not None and result.numel():
        torch.maximum(out_amax, result.abs().amax().float(), out=out_amax)
    return result


def _checked_sizes(
    a: EncodedMatrix, b: EncodedMatrix, out: Tensor | None, accumulate: bool
) -> tuple[int, int, int]:
    """Return M, N and K. Raise ValueError for operands or an `out` that do not fit."""
    (m, k_a), (n, k_b) = (s.shape if s.direction is ROWWISE else s.shape[::-1] for s in (a, b))
    if k_a != k_b:
        raise ValueError(
            f"gemm contracts {k_a} elements of a ({a.describe()}) with {k_b} of b ({b.describe()})"
        )
    if a.data.device != b.data.device:
        raise ValueError(
            f"gemm operand a is on {a.data.device} and b on {b.data.device}; wanted one device"
        )
    if accumulate and out is None:
        raise ValueError("gemm(accumulate=True) adds to `out`, got out=None")
    if out is not None and tuple(out.shape) != (m, n):
        raise ValueError(f"gemm writes [{m}, {n}] to `out`, got {list(out.shape)}")
    return m, n, k_a


def _domain_of(a: EncodedMatrix, b: EncodedMatrix, arch: str, batch_invariant: bool) -> str:
    """Return the fastest domain that computes this pair on `arch`."""
    domain = gemm_domain(a.fmt, b.fmt, a.dtype, arch, batch_invariant=batch_invariant)[0]
    if domain in ("native", "anchored") and (a.row0 or b.row0):
        # rows of a tensor have no layout of their own
        return "bf16" if a.decodes_exactly_to_bf16 and b.decodes_exactly_to_bf16 else "reference"
    return domain


def _multiply(
    a: EncodedMatrix,
    b: EncodedMatrix,
    out: Tensor | None,
    accumulate: bool,
    epilogue: Epilogue,
    watch: native.Watch | None,
    batch_invariant: bool,
) -> Tensor:
    """The product on the tensor cores, with partial sums in fp32."""
    out_dtype, bias, alpha = epilogue
    for operand in (a, b):
        if operand.tensor_amax is not None:
            scale = dispatch.tensor_decode_scale(operand.tensor_amax, operand.fmt)
            alpha = scale if alpha is None else alpha * scale
    left = native.Operand(a.data, a.scale, a.operand_format)
    right = native.Operand(b.data, b.scale, b.operand_format)
    if batch_invariant and left.fmt.block[1] != 512:  # the GEMM of 512 is always our own
        if watch is not None:
            native.product_error(left, right, watch)
        is_plain = bias is alpha is None and out_dtype is not torch.float16
        y = native.batch_invariant_gemm(left, right, out_dtype if is_plain else torch.float32)
        y = y if is_plain else Epilogue(out_dtype, bias, alpha).apply(y, None, None)
        return y if out is None else out.add_(y) if accumulate else out.copy_(y)
    return native.gemm(left, right, out_dtype, out, accumulate, bias, alpha, watch)


_ROWS = 128  # of a tile


def _batch_invariant(a: Tensor, b: Tensor, a_scale: Tensor | None = None) -> Tensor:
    """Compute a_scale * a b^T of values [m, k] and [n, k], in fp32. Each row has the bits that it
    has alone: by our own kernel, or in tiles of `_ROWS` rows, so that a library sees one size.

    Rows of a tile begin at multiples of 64 bytes, because kernels for CPUs choose by alignment.
    """
    (m, k), n = a.shape, b.shape[0]
    is_own = has_own_kernels(arch_of(a.device)) and native.is_available_for(a)
    if is_own and a.dtype is b.dtype is torch.bfloat16 and m * n * k > 0:
        left, right = (native.Operand(t.contiguous(), None, IDENTITY) for t in (a, b))
        y = native.batch_invariant_gemm(left, right, torch.float32)
    else:
        a, b = (F.pad(t, (0, -k % 16, 0, -len(t) % rows)) for t, rows in ((a, _ROWS), (b, 16)))
        y = torch.cat([_fp32_product(tile, b) for tile in a.split(_ROWS)])[:m, :n]
    return y if a_scale is None else y * a_scale[:, None]


def _native(a: Storage, b: Storage, epilogue: Epilogue, batch_invariant: bool) -> Tensor:
    """Both operands in their own dtype: exactly torch's linear. A wider result is rounded once."""
    out_dtype, bias, alpha = epilogue
    x, w = a.operand(), b.operand()
    if out_dtype is torch.float32 and x.dtype is w.dtype is not out_dtype:
        domain = _bf16 if x.dtype is torch.bfloat16 else _reference
        return domain(a, b, epilogue, batch_invariant)
    if x.dtype != w.dtype:
        raise ValueError(
            f"gemm of {x.dtype} by {w.dtype}, both in high precision: torch multiplies equal "
            "dtypes only; cast one, or set MixedPrecisionPolicy(param_dtype=) to the dtype of the "
            "activations"
        )
    if batch_invariant:
        return epilogue.apply(_batch_invariant(x, w), None, None)
    if bias is not None and alpha is None:
        return F.linear(x, w, bias.to(x.dtype)).to(out_dtype)
    product = x.mm(w.t())
    return product.to(out_dtype) if alpha is None else epilogue.apply(product, None, None)


def _bf16(a: Storage, b: Storage, epilogue: Epilogue, batch_invariant: bool) -> Tensor:
    """Both operands decoded exactly to bf16, fp32 accumulation; scales that span the contraction
    multiply after.

    Without scales on a GPU: cuBLAS on the decoded operands, through torch. A tensor's scales go
    into its alpha.
    """
    for name, storage in (("a", a), ("b", b)):
        if not storage.decodes_exactly_to_bf16:
            raise ValueError(
                f"operand {name} ({storage.describe()}, {storage.dtype}) does not decode exactly "
                "to bf16; use the reference domain"
            )
    out_dtype, bias, alpha = epilogue
    (x, scale_x), (w, scale_w) = a.factored_operand(), b.factored_operand()
    if batch_invariant:
        return epilogue.apply(_batch_invariant(x, w, scale_x), None, scale_w)
    factors = [f for f in (scale_x, scale_w, alpha) if f is not None]
    if (
        native.is_available_for(x)
        and all(f.numel() == 1 for f in factors)
        and x.numel()
        and w.numel()
    ):
        if (
            not factors
            and out_dtype is torch.bfloat16
            and (bias is None or bias.dtype is out_dtype)
        ):
            return F.linear(x, w, bias)
        left, right = (native.Operand(t, None, IDENTITY) for t in (x, w))
        written = torch.float32 if out_dtype is torch.float16 else out_dtype
        if factors:
            alpha = functools.reduce(torch.mul, (f.float().view(1) for f in factors))
        return native.gemm(left, right, written, None, False, bias, alpha).to(out_dtype)
    return epilogue.apply(_fp32_product(x, w), scale_x, scale_w)


def _fp32_product(a: Tensor, b: Tensor) -> Tensor:
    """a b^T of operands [m, k] and [n, k], accumulated in fp32 and returned in fp32.

    A CPU without bf16 matrix instructions multiplies the same bf16 values as fp32: the products are
    exact either way.
    """
    if a.is_cuda and a.dtype is not torch.float32:
        return torch.mm(a, b.t(), out_dtype=torch.float32)
    return a.float().mm(b.float().t())


def _reference(
    a: EncodedMatrix, b: EncodedMatrix, epilogue: Epilogue, batch_invariant: bool = False
) -> Tensor:
    """Both operands decoded to fp32 with all their scales, one fp32 product."""
    x, w = a.operand().float(), b.operand().float()
    product = _batch_invariant if batch_invariant else _fp32_product
    return epilogue.apply(product(x, w), None, None)


_DOMAINS = {"native": _native, "bf16": _bf16, "reference": _reference}


# The reference in graphs #


def _recorded(
    a: Storage, b: Storage, epilogue: Epilogue, domain: str, batch_invariant: bool
) -> Tensor:
    """The product as one operator, which no compiler looks into (`ops.opaque`)."""
    if native.is_available_for(a.data) and not batch_invariant:
        return _DOMAINS[domain](a, b, epilogue, False)
    buffers = (list(s.buffers().values()) for s in (a, b))
    texts = (f"{s.direction.value}|{s.layout}|{opaque.format_text(s.fmt)}" for s in (a, b))
    shapes, dtypes = [*a.shape, *b.shape], [a.dtype, b.dtype]
    return _product_op(*buffers, *texts, shapes, *dtypes, *epilogue, domain, batch_invariant)


@opaque.traced_as(_recorded)
def _decoded_product(
    a: Storage, b: Storage, epilogue: Epilogue, domain: str, batch_invariant: bool
) -> Tensor:
    return _DOMAINS[domain](a, b, epilogue, batch_invariant)


def _storage_over(
    buffers: Sequence[Tensor], text: str, shape: Sequence[int], dtype: torch.dtype
) -> Storage:
    direction, _, text = text.split("|", 2)
    rows, cols = shape
    return Storage.over(
        buffers, opaque.format_from(text), Direction(direction), (rows, cols), dtype
    )


def _run(a, b, a_is, b_is, shapes, a_dtype, b_dtype, out_dtype, bias, alpha, domain, invariant):
    a = _storage_over(a, a_is, shapes[:2], a_dtype)
    b = _storage_over(b, b_is, shapes[2:], b_dtype)
    a, b = a.readable("gemm operand a"), b.readable("gemm operand b")
    counters.add("gemm", (domain, repr(a.fmt), repr(b.fmt)))
    with torch.no_grad():
        return _DOMAINS[domain](a, b, Epilogue(out_dtype, bias, alpha), invariant)


def _fake(a, b, a_is, b_is, shapes, a_dtype, b_dtype, out_dtype, *rest):
    m, n = shapes[a_is.startswith(COLUMNWISE.value)], shapes[2 + b_is.startswith(COLUMNWISE.value)]
    return a[0].new_empty((m, n), dtype=out_dtype)


_product_op = opaque.define(
    "reference_gemm(Tensor[] a, Tensor[] b, str a_is, str b_is, SymInt[] shapes, ScalarType "
    "a_dtype, ScalarType b_dtype, ScalarType out_dtype, Tensor? bias, Tensor? alpha, str domain, "
    "bool batch_invariant) -> Tensor",
    _run,
    _fake,
)


@register_flop_formula(torch.ops.fsdp_quant.reference_gemm)
def _flops(a, b, a_is, b_is, shapes, *rest, out_shape):
    return 2 * prod(out_shape) * shapes[a_is.startswith(ROWWISE.value)]
