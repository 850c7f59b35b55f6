"""`gemm`: the one place where storages are unpacked into a matrix product.

Every product is NT in its storages' own axes: a storage presents [outer, contraction] whatever its direction, so

    y  = gemm(x.rowwise,     w.rowwise)       [M, K] x [N, K] -> [M, N]
    dx = gemm(dy.rowwise,    w.columnwise)    [M, N] x [K, N] -> [M, K]
    dw = gemm(dy.columnwise, x.columnwise)    [N, M] x [K, M] -> [N, K]
"""

from __future__ import annotations

import torch
from torch import Tensor

from .counters import counters
from .formats import check_pair
from .ops.capability import DOMAINS, arch_of, gemm_domain
from .ops.reference import bf16_product
from .storage import Storage


class StaleWeightError(RuntimeError):
    """A GEMM would read codes that were freed, or made from a master that has changed since."""


def gemm(
    a: Storage,
    b: Storage,
    *,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    accumulate: bool = False,
    bias: Tensor | None = None,
    alpha: Tensor | None = None,
    out_amax: Tensor | None = None,
    domain: str | None = None,
) -> Tensor:
    """alpha * a b^T + bias, with a [outer_a, contraction] and b [outer_b, contraction].

    out_dtype:   dtype of the result (default: that of `out`, else a's).
    out:         written instead of a new tensor; with accumulate=True added to, in out's dtype.
    bias:        [outer_b].
    alpha:       fp32 scalar tensor.
    out_amax:    fp32 [1]: raised to the largest magnitude of the result.
    domain:      "native", "bf16" or "reference" (default: the fastest that computes this pair here).
    returns:     [outer_a, outer_b].

    Raises ValueError for contractions that differ, a rotation on one operand only, an unknown domain, or a
    domain that cannot compute the pair exactly; StaleWeightError for freed codes.
    """
    check_pair("gemm", a.fmt, b.fmt, "a", "b")
    for name, storage in (("a", a), ("b", b)):
        if storage.is_freed:
            raise StaleWeightError(
                f"gemm operand {name} ({storage.describe()}) was freed: FSDP resharded it, or gathered the other "
                "direction only; under activation checkpointing of a compiled block set recomputes_forward=True on "
                "its fq.Linear modules"
            )
    k_a, k_b = (s.shape[s.direction.contraction_dim] for s in (a, b))
    if k_a != k_b:
        raise ValueError(f"gemm contracts {k_a} elements of a ({a.describe()}) with {k_b} of b ({b.describe()})")
    if accumulate and out is None:
        raise ValueError("gemm(accumulate=True) adds to `out`, got out=None")
    out_dtype = out_dtype or (out.dtype if out is not None else a.dtype)
    if domain is None:
        domain = gemm_domain(a.fmt, b.fmt, out_dtype, arch_of(a.data.device))[0]
    if domain not in DOMAINS:
        raise ValueError(f"unknown GEMM domain {domain!r}; known domains: {', '.join(DOMAINS)}")
    result = _DOMAINS[domain](a, b, out_dtype, bias, alpha)
    counters.add("gemm", (domain, repr(a.fmt), repr(b.fmt)))
    if out_amax is not None and result.numel():
        torch.maximum(out_amax, result.abs().amax().float(), out=out_amax)
    if out is None:
        return result
    return out.add_(result) if accumulate else out.copy_(result)


def _native(a: Storage, b: Storage, out_dtype: torch.dtype, bias: Tensor | None, alpha: Tensor | None) -> Tensor:
    """Both operands in their own dtype: exactly torch's linear."""
    if a.fmt.is_quantized or b.fmt.is_quantized:
        raise ValueError(f"no compiled kernel multiplies {a.fmt} by {b.fmt} here; use the bf16 or reference domain")
    x, w = a.operand(), b.operand()
    if x.dtype != w.dtype:
        raise ValueError(
            f"gemm of {x.dtype} by {w.dtype}, both in high precision: torch multiplies equal dtypes only; cast one, or set "
            "MixedPrecisionPolicy(param_dtype=) to the dtype of the activations"
        )
    if bias is not None and alpha is None:
        return torch.nn.functional.linear(x, w, bias.to(x.dtype)).to(out_dtype)
    product = x.mm(w.t())
    return _finish(product, out_dtype, bias, alpha) if bias is not None or alpha is not None else product.to(out_dtype)


def _bf16(a: Storage, b: Storage, out_dtype: torch.dtype, bias: Tensor | None, alpha: Tensor | None) -> Tensor:
    """Both operands decoded exactly to bf16, fp32 accumulation; scales that span the contraction multiply after."""
    for name, storage in (("a", a), ("b", b)):
        if not storage.decodes_exactly_to_bf16:
            raise ValueError(
                f"operand {name} ({storage.describe()}, {storage.dtype}) does not decode exactly to bf16; "
                "use the reference domain"
            )
    (x, scale_x), (w, scale_w) = a.factored_operand(), b.factored_operand()
    return _finish(bf16_product(x, w), out_dtype, bias, alpha, scale_x, scale_w)


def _reference(a: Storage, b: Storage, out_dtype: torch.dtype, bias: Tensor | None, alpha: Tensor | None) -> Tensor:
    """Both operands decoded to fp32 with all their scales, one fp32 product."""
    return _finish(a.operand().float().mm(b.operand().float().t()), out_dtype, bias, alpha)


def _finish(
    product: Tensor, out_dtype: torch.dtype, bias: Tensor | None, alpha: Tensor | None,
    scale_a: Tensor | None = None, scale_b: Tensor | None = None,
) -> Tensor:
    """Epilogue in fp32: global scales (their product first when both are of a tensor), alpha, bias, one rounding."""
    y = product.float()
    if scale_a is not None and scale_b is not None and scale_a.numel() == scale_b.numel() == 1:
        scale_a, scale_b = scale_a * scale_b, None
    if scale_a is not None:
        y = y * scale_a[:, None]
    if scale_b is not None:
        y = y * scale_b
    if alpha is not None:
        y = y * alpha
    if bias is not None:
        y = y + bias.float()
    return y.to(out_dtype)


_DOMAINS = {"native": _native, "bf16": _bf16, "reference": _reference}
