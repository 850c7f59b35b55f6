# SPDX-License-Identifier: Apache-2.0
"""`fq.optim.FusedAdam` with moments in 8 bits, and masters as remainders of bf16 parameters."""

from __future__ import annotations

import contextlib
import io

import pytest
import torch
from torch import nn

import fsdp_quant as fq
from dist_tests import laws
from dist_tests.multi.harness import DEVICE
from dist_tests.single import hopper
from fsdp_quant.optim import compact
from fsdp_quant.optim.fused_adam import _scalars, adam_update

CODES = {"moment_dtype": torch.float8_e4m3fn}
SHAPES = ((16, 256), (70, 300), (8, 33, 40), (2, 4096))  # whole blocks, tails, three dims


def matrices(dtype: torch.dtype = torch.float32, shapes=SHAPES) -> list[nn.Parameter]:
    return [nn.Parameter(laws.values(*s, seed=i, dtype=dtype)) for i, s in enumerate(shapes)]


def give_gradients(params: list[nn.Parameter], step: int) -> None:
    for i, p in enumerate(params):
        p.grad = laws.values(
            *p.shape, seed=step * 31 + i, dtype=p.dtype, kind=("gauss", "heavy")[step % 2]
        )


def run(optimizer, params: list[nn.Parameter], steps=range(5)) -> None:
    for step in steps:
        give_gradients(params, step)
        optimizer.step()


def test_codes_of_moments_are_near_them_and_stay():
    """If false, a state drifts by being saved, or an update divides by 0."""
    for kind in ("gauss", "heavy", "outliers", "tiny"):
        x = laws.values(33, 5, 130, dtype=torch.float32, kind=kind)
        for value, is_root in ((x, False), (x.abs(), True)):
            codes, scale = compact.encode(value, is_root)
            decoded = compact.decode(codes, scale)
            largest = compact._blocks(value).abs().amax(-1)
            assert scale.shape == (33, 3) and torch.equal(scale, largest / 256)
            step = torch.maximum(
                value.abs() * 2.0**-4,
                compact._unblocked(
                    (largest * 2.0**-17).unsqueeze(-1).expand(33, 3, 256), value.shape
                ),
            )
            assert ((decoded - value).abs() <= step).all(), (
                f"{kind}, {is_root}: more than a step of e4m3 away"
            )
            for got, want in zip(compact.encode(decoded, is_root), (codes, scale)):
                laws.assert_same_bytes(got, want, "encoded again")
            assert not is_root or ((decoded > 0) == (value > 0)).all()
    zero = compact.encode(torch.zeros(2, 300), True)
    assert not any(t.any() for t in zero) and not compact.decode(*zero).any()
    assert compact.decode(*compact.encode(torch.tensor([[1.0, float("nan")]]))).isnan().all()


def by_block(x: torch.Tensor, is_root: bool) -> torch.Tensor:
    """Saved and read, each 256 elements of a row by themselves."""
    rows = []
    for row in x.flatten(1):
        saved = [compact.encode(block[None], is_root) for block in row.split(256)]
        rows.append(torch.cat([compact.decode(*one)[0] for one in saved]))
    return torch.stack(rows).view(x.shape)


def test_eight_bit_moments_train_as_the_update_says():
    """If false, moments are rounded before the update uses them, or blocks are others."""
    params = matrices()
    optimizer = fq.optim.FusedAdam(params, lr=1e-2, **CODES)
    kept = [(p.detach().clone(), torch.zeros_like(p), torch.zeros_like(p)) for p in params]
    for step in range(4):
        give_gradients(params, step)
        optimizer.step()
        row = torch.tensor(
            [_scalars(optimizer.param_groups[0], 1e-2, 0.9 ** (step + 1), 0.999 ** (step + 1))]
        )[0]
        for i, (p, (value, m, v)) in enumerate(zip(params, kept)):
            value, m, v = adam_update(value, p.grad, m, v, None, row)
            laws.assert_same_bytes(p.detach(), value, f"{list(p.shape)}, step {step}")
            m, v = by_block(m, False), by_block(v.double().sqrt().float(), True).square()
            kept[i] = value, m, v


def test_eight_bit_moments_are_near_fp32_ones():
    """If false, 8-bit moments train another model: updates differ by over a tenth of their size.

    exp_avg_sq without gradients shrinks by beta2 per step, which codes alone would round away.
    """
    runs = []
    for options in (CODES, {}):
        params = matrices()
        optimizer = fq.optim.FusedAdam(
            params, lr=1e-3, weight_decay=0.0, betas=(0.9, 0.95), **options
        )
        run(optimizer, params, range(12))
        runs.append((params, optimizer))
    for p, q, start in zip(runs[0][0], runs[1][0], matrices()):
        assert (p - q).norm() < 0.1 * (q - start).norm(), list(p.shape)
    for params, optimizer in runs:
        for p in params:
            p.grad = torch.zeros_like(p)
        for _ in range(60):
            optimizer.step()
    for p, q in zip(runs[0][0], runs[1][0]):
        state, want = runs[0][1].state[p], runs[1][1].state[q]["exp_avg_sq"]
        got = compact.decode(state["exp_avg_sq_codes"], state["exp_avg_sq_scale"]).square()
        assert 0.8 < got.sum() / want.sum() < 1.25, f"{list(p.shape)}: {got.sum() / want.sum()}"


@pytest.mark.parametrize("cut", [1, 5, 13])
def test_eight_bit_moments_do_not_depend_on_the_cut_of_rows(cut, monkeypatch):
    """If false, what a weight becomes depends on where the shards are cut."""
    # of a whole tensor; these shards are tensors of their own
    monkeypatch.setattr(compact, "LEAST", 1)
    grad = laws.values(32, 300, seed=1, dtype=torch.float32)
    whole = nn.Parameter(laws.values(32, 300, dtype=torch.float32))
    shards = [nn.Parameter(part.clone()) for part in (whole.detach()[:cut], whole.detach()[cut:])]
    whole_of = fq.optim.FusedAdam([whole], lr=1e-2, **CODES)
    cut_of = fq.optim.FusedAdam(shards, lr=1e-2, **CODES)
    for step in range(4):
        whole.grad, shards[0].grad, shards[1].grad = (
            grad * step,
            grad[:cut] * step,
            grad[cut:] * step,
        )
        whole_of.step()
        cut_of.step()
    laws.assert_same_bytes(torch.cat([p.detach() for p in shards]), whole.detach(), f"cut at {cut}")
    for name in ("exp_avg_codes", "exp_avg_scale", "exp_avg_sq_codes", "exp_avg_sq_scale"):
        laws.assert_same_bytes(
            torch.cat([cut_of.state[p][name] for p in shards]), whole_of.state[whole][name], name
        )


def test_remainders_are_masters_bit_for_bit():
    """If false, updates are lost. Parameters differ from rounded masters in ties alone."""
    a, b = (matrices(torch.bfloat16, (*SHAPES, (5,), (1, 1))) for _ in range(2))
    low = fq.optim.FusedAdam(a, lr=1e-4, store_param_remainders=True)
    high = fq.optim.FusedAdam(b, lr=1e-4)
    for step in range(8):
        give_gradients(a, step)
        for p, q in zip(a, b):
            q.grad = p.grad
        low.step()
        high.step()
        for p, q in zip(a, b):
            master = high.state[q]["master"]
            laws.assert_same_bytes(
                compact.join(p.detach(), low.state[p]["remainder"]), master, f"master, step {step}"
            )
            ties = master.view(torch.int32) & 0xFFFF == 0x8000
            assert torch.equal(p[~ties], q[~ties])
    assert "master" not in low.state[a[0]] and low.state[a[0]]["remainder"].nbytes == a[0].nbytes


@pytest.mark.parametrize(
    "value", [0.0, -0.0, 1.0, 3.4e38, 1e-45, float("inf"), -float("inf"), float("nan")]
)
def test_any_master_is_split_and_joined(value):
    """If false, some master comes back as another one, such as a tie or its neighbours."""
    bits = torch.tensor([value]).view(torch.int32)
    lower = torch.arange(-3, 4, dtype=torch.int32)
    bits = torch.cat([bits, bits & ~0xFFFF | (lower & 0xFFFF), bits & ~0xFFFF | (0x8000 + lower)])
    master = bits.view(torch.float32)
    high, low = compact.split(master)
    assert torch.equal(compact.join(high, low).nan_to_num(7.0), master.nan_to_num(7.0))
    assert torch.equal(high.isnan(), master.isnan())
    ties = bits & 0xFFFF == 0x8000
    assert torch.equal(high[~ties].nan_to_num(7.0), master[~ties].bfloat16().nan_to_num(7.0)), (
        "not the nearest"
    )


@pytest.mark.parametrize(
    "options", [CODES, {"store_param_remainders": True}, CODES | {"store_param_remainders": True}]
)
def test_compact_states_are_saved_and_loaded(options):
    """If false, resuming changes a run, or loads codes as values."""
    dtype = torch.bfloat16 if "store_param_remainders" in options else torch.float32
    ours = matrices(dtype)
    a = fq.optim.FusedAdam(ours, lr=1e-2, **options)
    run(a, ours, range(2))
    file = io.BytesIO()
    torch.save({"optim": a.state_dict(), "params": [p.detach() for p in ours]}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed = [nn.Parameter(p) for p in saved["params"]]
    b = fq.optim.FusedAdam(resumed, lr=0.5, **options)
    b.load_state_dict(saved["optim"])
    values = fq.optim.FusedAdam([nn.Parameter(p.detach().float()) for p in ours])
    if dtype is torch.float32:  # moments in codes and moments in values read each other
        values.load_state_dict(a.state_dict())
        back = fq.optim.FusedAdam(matrices(dtype), **options)
        back.load_state_dict(values.state_dict())
        for p, q in zip(ours, back.param_groups[0]["params"]):
            for key, value in a.state[p].items():
                laws.assert_same_bytes(back.state[q][key], value, f"{key} through values")
    else:
        with pytest.raises(ValueError, match="FusedAdam needs .*remainder"):
            b.load_state_dict(fq.optim.FusedAdam(matrices(dtype), **CODES).state_dict())
    run(a, ours, range(2, 4))
    run(b, resumed, range(2, 4))
    for p, q in zip(ours, resumed):
        for key, value in a.state[p].items():
            laws.assert_same_bytes(b.state[q][key], value, key)
        laws.assert_same_bytes(q.detach(), p.detach(), "parameter")


@pytest.mark.skipif(DEVICE != "cpu", reason="emulates a GPU on a CPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_is_given_compact_states_in_one_launch(dtype):
    """If false, states in codes cost a launch per tensor, or the operator is told other tensors."""
    results = []
    for gpu in (True, False):
        with hopper.emulated() if gpu else contextlib.nullcontext() as emulated:
            params = matrices(dtype, SHAPES[:2])
            optimizer = fq.optim.FusedAdam(params, store_param_remainders=True, **CODES)
            run(optimizer, params, range(2))
            assert emulated is None or emulated.count("adam") == 2
        results.append([t for p in params for t in (p.detach(), *optimizer.state[p].values())])
    for got, want in zip(*results, strict=True):
        laws.assert_same_bytes(got, want, f"{dtype}")


def test_small_tensors_keep_fp32_moments():
    """If false, norms and biases lose precision for no memory."""
    params = [nn.Parameter(torch.zeros(s)) for s in ((8192,), (16, 16), (), (64, 64))]
    optimizer = fq.optim.FusedAdam(params, **CODES)
    assert [optimizer.state[p].get("exp_avg", torch.empty(0)).dtype for p in params[:3]] == [
        torch.float32
    ] * 3
    assert ["exp_avg_codes" in optimizer.state[p] for p in params] == [False, False, False, True]
