# SPDX-License-Identifier: Apache-2.0
"""Training under `fully_shard`: gradients, updates, directions, bytes, recomputation, events."""

from __future__ import annotations

import collections
import contextlib
import gc
import itertools
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import prune

import fsdp_quant as fq
from dist_tests import laws
from dist_tests.multi import nets
from dist_tests.multi.harness import DEVICE, on_cpu, run_ranks
from dist_tests.single import hopper
from fsdp_quant.counters import counters
from fsdp_quant.formats import format_of
from fsdp_quant.inspection import plan
from fsdp_quant.linear import has_weight
from fsdp_quant.models.steps import converted_modules
from fsdp_quant.recipe import Role
from fsdp_quant.tensor import gather_group, root_statistics
from fsdp_quant.tensor.fsdp_hooks import FSDPHooks
from fsdp_quant.tensor.quantized_tensor import QuantizedTensor
from fsdp_quant.tensor.torch_compat import local_of
from fsdp_quant.tensor.weight_shard import WeightShard
from fsdp_quant.training import training_state

RECIPES = {
    "mxfp8/nvfp4": fq.recipes.hybrid("mxfp8", "nvfp4"),
    "nvfp4": fq.recipes.nvfp4(),
    "mxfp8/nvfp4 exact": fq.recipes.hybrid("mxfp8", "nvfp4", scale_rule="fp8_exact"),
    "fp8_block": fq.recipes.fp8_block(),
    "fp8_current/fp8_row": fq.recipes.hybrid("fp8_current", "fp8_row"),
    "mxfp8, dequantized": fq.recipes.mxfp8(backward_override="dequantized"),
    "nvfp4, high precision": fq.recipes.nvfp4(backward_override="high_precision"),
}
FEW = (
    RECIPES
    if laws.EVERYTHING
    else {
        k: RECIPES[k]
        for k in ("mxfp8/nvfp4", "mxfp8/nvfp4 exact", "fp8_block", "fp8_current/fp8_row")
    }
)


def _sample(shift: int) -> dict[str, fq.Recipe]:
    """Half of the pairs of formats that differ by shift, and the even or odd half of RECIPES."""
    pairs = laws.every_second(laws.diagonals(shift), shift // 2)
    named = {f"{r}/{c}": nets.pair_recipe(r, c) for r, c in pairs}
    return named | dict(laws.every_second(list(RECIPES.items()), shift))


def _same_as_whole_weights(rank: int, world: int) -> None:
    """Our gather against a plain FSDP2 gather whose ranks quantize the whole weight themselves."""
    for label, recipe in _sample(world).items():
        ours, oracle = nets.build(), nets.build()
        fq.convert(ours, recipe)
        nets.shard(ours)
        nets.shard(nets.as_oracle(oracle, recipe))
        a, b = nets.adam(ours), nets.adam(oracle)
        for step in range(2):
            got, want = nets.train_step(ours, a, step, rank), nets.train_step(oracle, b, step, rank)
            laws.assert_same_bytes(got, want, f"world {world}, {label}: output of step {step}")
        got, want = nets.full_state(ours), nets.full_state(oracle)
        for name, value in want.items():
            laws.assert_same_bytes(
                got[name], value, f"world {world}, {label}: {name} after 2 steps"
            )


@pytest.mark.parametrize("world", [1, 2, 3, 4] if laws.EVERYTHING else [3])
def test_training_equals_plain_fsdp_on_whole_weights(world):
    """If false, sharding the quantization changes gradients or weights."""
    run_ranks(world, _same_as_whole_weights)


def _same_as_one_process(rank: int, world: int) -> None:
    """Equal data on every rank: averaging equal gradients is exact at worlds 1 and 2."""
    for label, recipe in (
        _sample(world + 4) | {"delayed": fq.recipes.fp8_delayed(length=2)}
    ).items():
        sharded, single = nets.build(), nets.build()
        fq.convert(sharded, recipe)
        fq.convert(single, recipe)
        nets.shard(sharded)
        a, b = nets.adam(sharded), nets.adam(single)
        for step in range(3):
            got, want = nets.train_step(sharded, a, step), nets.train_step(single, b, step)
            laws.assert_same_bytes(got, want, f"world {world}, {label}: output of step {step}")
        state = nets.full_state(sharded)
        for name, value in single.state_dict().items():
            laws.assert_same_bytes(state[name], value, f"world {world}, {label}: {name}")


@pytest.mark.parametrize("world", laws.every_second([1, 2], 1))
def test_training_equals_one_process(world):
    """If false, a sharded model is another model than the same one in one process."""
    run_ranks(world, _same_as_one_process)


def _reshard_modes(rank: int, world: int) -> None:
    for label, recipe in FEW.items():
        results = {}
        for reshard in (True, False):
            net = nets.build()
            fq.convert(net, recipe)
            nets.shard(net, reshard_after_forward=reshard)
            optimizer = nets.adam(net)
            results[reshard] = [nets.train_step(net, optimizer, s, rank) for s in range(2)] + list(
                nets.full_state(net).values()
            )
        for got, want in zip(results[False], results[True]):
            laws.assert_same_bytes(got, want, f"{label}: reshard_after_forward False against True")


def test_reshard_after_forward_modes_train_alike():
    """If false, keeping weights gathered multiplies other bytes than gathering them again."""
    run_ranks(2, _reshard_modes)


def _bytes_on_the_wire(rank: int, world: int) -> None:
    for recompute in (False, True):
        for label, recipe in (FEW if recompute else RECIPES).items():
            net = nets.build(recompute=recompute)
            fq.convert(net, recipe)
            nets.shard(net)
            before = fq.plan(net)
            for _ in range(2):
                x = nets.batch(rank=rank)
                counters.reset()
                with nets.recorded_collectives() as forward:
                    y = net(x)
                planned = fq.plan(net)
                with nets.recorded_collectives() as backward:
                    y.square().mean().backward()
                sizes = [
                    sum(n for kind, n in seen if kind == "all_gather")
                    for seen in (forward, backward)
                ]
                want = [
                    planned.bytes_per_step(backward=False),
                    planned.bytes_per_step(forward=False),
                ]
                assert sizes == want, (
                    f"{label}, recompute {recompute}: gathered {sizes}, the plan says {want}"
                )
                assert before.bytes_per_step(backward=False) == want[0], (
                    "the plan changed with the first forward"
                )
                counted = fq.receipt().gathered_bytes
                assert counted + sum(planned.other_bytes) == sum(sizes), (
                    "the receipt does not add up to the wire"
                )
            if label == "mxfp8/nvfp4":
                receipt = fq.receipt()
                formats = {fmt for when, _, fmt in receipt.gathers if when == "backward"}
                assert formats == ({"nvfp4", "mxfp8"} if recompute else {"nvfp4"}), str(receipt)
                blocks = [n for n in planned.weight_bytes if n.startswith("blocks")]
                forward_of_blocks = sum(planned.weight_bytes[n][0] for n in blocks)
                head = planned.weight_bytes["head.weight"][0]
                forward = [n for (when, *_), n in receipt.gathers.items() if when == "forward"]
                assert sum(forward) == forward_of_blocks + head


def test_bytes_on_the_wire_equal_the_plan():
    """If false, a pass gathers bytes that nothing multiplies, or a high-precision gather slipped
    in."""
    run_ranks(2, _bytes_on_the_wire)


def _recomputation(rank: int, world: int) -> None:
    for label, recipe in FEW.items():
        nets_ = []
        for recompute in (False, True):
            net = nets.build(recompute=recompute)
            fq.convert(net, recipe)
            nets.shard(net)
            optimizer = nets.adam(net)
            nets_.append(
                [nets.train_step(net, optimizer, s, rank) for s in range(2)]
                + list(nets.full_state(net).values())
            )
        for plain, recomputed in zip(*nets_):
            laws.assert_same_bytes(recomputed, plain, f"{label}: with and without recomputation")


def test_activation_checkpointing_trains_alike():
    """If false, recomputation reads freed codes, other bytes or other random bits."""
    run_ranks(2, _recomputation)


def _saved_tensor_hooks_of_users(rank: int, world: int) -> None:
    recipe = RECIPES["mxfp8/nvfp4"]
    results = []
    for offload in (False, True):
        net = nets.build()
        fq.convert(net, recipe)
        nets.shard(net)
        counters.reset()
        with (
            torch.autograd.graph.save_on_cpu() if offload else torch.enable_grad(),
            fq.token_offset(0),
        ):
            net(nets.batch()).square().mean().backward()
        results.append((fq.receipt().gathers, nets.full(net.head.weight.grad)))
    assert results[0][0] == results[1][0], (
        f"offloading saved tensors changed the gathers: {results}"
    )
    laws.assert_same_bytes(results[1][1], results[0][1], "gradient under save_on_cpu")


def test_saved_tensor_hooks_of_users_change_no_gather():
    """If false, offloading is mistaken for recomputation and doubles the bytes."""
    run_ranks(2, _saved_tensor_hooks_of_users)


def _eval_between(rank: int, world: int) -> None:
    for recipe in (RECIPES["mxfp8/nvfp4"], RECIPES["nvfp4"]):
        outputs = []
        for evaluate in (False, True):
            net = nets.build()
            fq.convert(net, recipe)
            nets.shard(net)
            optimizer = nets.adam(net)
            seen = [nets.train_step(net, optimizer, 0, rank)]
            if evaluate:
                net.eval()
                with torch.no_grad():
                    counters.reset()
                    net(nets.batch(5))
                    directions = {(phase, d) for phase, d, _ in counters.of("gather")}
                    assert ("backward", "columnwise") not in directions
                net.train()
            seen.append(nets.train_step(net, optimizer, 1, rank))
            outputs.append(seen + list(nets.full_state(net).values()))
        for with_eval, without in zip(outputs[1], outputs[0]):
            laws.assert_same_bytes(with_eval, without, "training with an evaluation in between")


def test_eval_between_steps_changes_nothing():
    """If false, evaluation leaves stale or one-sided codes behind."""
    run_ranks(2, _eval_between)


def _gathered_late(rank: int, world: int) -> None:
    net = nets.shard(fq.convert(nets.build(), RECIPES["fp8_block"]))
    late = "none of the 3 parts that fully_shard gathers is gathered ahead"
    with pytest.MonkeyPatch.context() as patch:
        assert late not in str(fq.plan(net)), "a toy"
        patch.setattr(plan, "MANY_PARTS", 3)
        assert late in str(fq.plan(net))
        net.blocks[0].set_modules_to_forward_prefetch([net.blocks[1]])
        assert late not in str(fq.plan(net))


def test_the_plan_says_that_no_forward_gathers_ahead():
    """If false, a compiled step waits for the host and nobody is told of the remedy."""
    run_ranks(2, _gathered_late)


def _weights_in_turn(rank: int, world: int) -> None:
    outputs = []
    for assigns in (False, True):
        net = nets.shard(fq.convert(nets.build(), RECIPES["mxfp8/nvfp4"]))
        optimizer, adopted = nets.adam(net), []
        for step in range(2):
            nets.train_step(net, optimizer, step, rank)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(has_weight, "adopt", lambda module, weight: adopted.append(weight))
            nets.train_step(net, optimizer, 2, rank)
        assert not adopted, "a weight that FSDP2 registered before"
        if assigns:
            values = {k: v.clone() for k, v in net.state_dict().items()}
            net.load_state_dict(values, assign=True)
            assert isinstance(local_of(net.blocks[0].up.weight), WeightShard)
        outputs.append(net(nets.batch(3, rank=rank)))
    laws.assert_same_bytes(*outputs, "a forward of weights that a load put in their place")


def test_weights_that_fsdp2_registers_in_turn_are_adopted_once():
    """If false, each gather costs the host a tenth of a millisecond per layer, or a weight from
    elsewhere is not gathered as codes."""
    run_ranks(2, _weights_in_turn)


def _weights_taken_out(rank: int, world: int) -> None:
    def pruned(layer: nn.Module) -> None:
        prune.identity(layer, "weight")
        prune.remove(layer, "weight")

    def put_back(layer: nn.Module) -> None:
        weight = layer.weight
        del layer.weight
        layer.weight = weight

    outputs = []
    for change in (lambda layer: None, put_back, pruned):
        net = nets.shard(fq.convert(nets.build(), RECIPES["mxfp8/nvfp4"]))
        optimizer = nets.adam(net)
        for step in range(2):
            nets.train_step(net, optimizer, step, rank)
            change(net.blocks[0].up)
            assert isinstance(local_of(net.blocks[0].up.weight), WeightShard)
        outputs.append(net(nets.batch(3, rank=rank)))
    for output in outputs[1:]:
        laws.assert_same_bytes(output, outputs[0], "a forward of weights that were taken out")


def test_a_weight_that_is_taken_out_between_steps_can_be_put_back():
    """If false, `del layer.weight` and torch's pruning, which nn.Linear under fully_shard bears,
    end in a KeyError."""
    run_ranks(2, _weights_taken_out)


def _meta_init(rank: int, world: int) -> None:
    recipe = RECIPES["mxfp8/nvfp4"]
    torch.manual_seed(3)
    cpu = nets.Net()
    want = {n: p.detach().clone() for n, p in cpu.named_parameters()}
    fq.convert(cpu, recipe)
    nets.shard(cpu)
    with torch.device("meta"):
        meta = nets.Net()
    fq.convert(meta, recipe)
    nets.shard(meta)
    meta.to_empty(device=DEVICE)
    for name, parameter in meta.named_parameters():
        local = parameter._local_tensor
        shard = (
            want[name].chunk(world)[rank] if rank < len(want[name].chunk(world)) else want[name][:0]
        )
        with torch.no_grad():
            local.copy_(shard)
        assert (
            name.endswith("weight") is False or "norm" in name or isinstance(local, WeightShard)
        ), name
    a, b = nets.adam(cpu), nets.adam(meta)
    for step in range(2):
        got, wanted = nets.train_step(meta, b, step), nets.train_step(cpu, a, step)
        laws.assert_same_bytes(got, wanted, f"meta against CPU initialization, step {step}")


def test_meta_device_init_equals_cpu_init():
    """If false, deferred initialization loses the wrapper or trains other weights."""
    run_ranks(3, _meta_init)


def _convert_order(rank: int, world: int) -> None:
    for label, recipe in laws.every_second(list(FEW.items()), 1):
        results = []
        for late in ("", "late", "after an evaluation"):
            net = nets.build()
            if not late:
                fq.convert(net, recipe)
            nets.shard(net)
            optimizer = nets.adam(net)
            if late == "after an evaluation":
                with torch.no_grad():
                    net(nets.batch(0))  # it leaves the root gathered
            if late:
                held = [id(p) for group in optimizer.param_groups for p in group["params"]]
                fq.convert(net, recipe)
                assert held == [id(p) for p in net.parameters()], (
                    "the optimizer lost its parameters"
                )
            results.append([nets.train_step(net, optimizer, s, rank) for s in range(2)])
        for early, *others in zip(*results):
            for late in others:
                laws.assert_same_bytes(
                    late, early, f"{label}: convert after against before fully_shard"
                )
    inside = nn.Sequential(nn.Linear(nets.K, nets.K))
    outer = fully_shard(nn.Sequential(inside))
    with torch.no_grad():
        outer(nets.batch(0))
    with pytest.raises(ValueError, match="is gathered by an FSDP module around Sequential"):
        fq.convert(inside, "mxfp8")
    assert type(inside[0]) is nn.Linear
    broken = fully_shard(nn.Linear(nets.K, nets.K))
    broken.weight = nn.Parameter(torch.ones(nets.K, nets.K))
    with pytest.raises(AttributeError):  # torch's
        broken(nets.batch(0))
    sound = fully_shard(fq.convert(nn.Linear(nets.K, nets.K), "mxfp8"))
    with pytest.raises(ValueError, match="fq.unconvert: .* was sharded; load its full state dict"):
        fq.unconvert(sound)


def test_convert_after_fully_shard_equals_before():
    """If false, the order of the two calls matters, also after an evaluation, an optimizer built in
    between trains nothing, or a broken model breaks others."""
    run_ranks(3, _convert_order)


def _set_recipe(rank: int, world: int) -> None:
    for reshard in (True, False):
        names = list(RECIPES if reshard else FEW)
        net = nets.build()
        fq.convert(net, RECIPES[names[0]])
        nets.shard(net, reshard_after_forward=reshard)
        optimizer = nets.adam(net)
        for step, name in enumerate(names[1:] + names[:1]):
            nets.train_step(net, optimizer, step, rank)
            fq.set_recipe(net, RECIPES[name])
            fresh = nets.build()
            fresh.load_state_dict(nets.full_state(net))
            fq.convert(fresh, RECIPES[name])
            nets.shard(fresh)
            x = nets.batch(9, rank=rank)
            with fq.token_offset(0):
                got, want = net(x), fresh(x)
                got.sum().backward()
                want.sum().backward()
            laws.assert_same_bytes(got.detach(), want.detach(), f"output after set_recipe({name})")
            for (n, p), q in zip(net.named_parameters(), fresh.parameters()):
                laws.assert_same_bytes(
                    nets.full(p.grad),
                    nets.full(q.grad),
                    f"gradient of {n} after set_recipe({name})",
                )
            optimizer.zero_grad()


def test_set_recipe_equals_a_fresh_model():
    """If false, a change of format in mid-training reads buffers of the old one."""
    run_ranks(2, _set_recipe)


def _collectives_of_a_step(rank: int, world: int) -> list:
    seen, counts = [], collections.Counter()
    net = nets.build(recompute=True)
    fq.convert(net, RECIPES["mxfp8/nvfp4"])
    nets.shard(net)
    optimizer = nets.adam(net)

    @contextlib.contextmanager
    def counted(what: str):
        with nets.recorded_collectives() as of:
            yield
        counts[what] = [kind for kind, _ in of].count("all_reduce")
        seen.extend([(what, "", 0), *((what, *one) for one in of)])

    for step in range(2):
        for micro in range(2):
            with counted(f"forward {step}.{micro}"):
                loss = net(nets.batch(micro, rank=rank)).square().mean()
            with counted(f"backward {step}.{micro}"):
                loss.backward()
        with counted(f"optimizer {step}"):
            optimizer.step()
            optimizer.zero_grad()
    net.eval()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), counted(f"forward {mode.__name__}"):
            net(nets.batch(3))
    net.reshard()
    for module, name in ((net, "root"), (net.blocks[0], "block")):
        with counted(f"unshard {name}"):
            module.unshard()
        module.reshard()
    with counted("forward after unshard"):
        net(nets.batch(3))
    for what, number in counts.items():
        # the first gather compares recipes too
        want = what.startswith(("forward", "unshard")) + (what == "forward 0.0")
        assert number == want, f"{what}: {number} MAX all-reduces, wanted {int(want)}: {counts}"
    return seen


def test_one_amax_collective_per_forward_of_the_root_and_the_same_list_on_every_rank():
    """If false, ranks with empty shards or no statistics of their own hang the others, or a
    backward waits for all."""
    lists = run_ranks(4, _collectives_of_a_step)
    assert all(seen == lists[0] for seen in lists)


def _mutations_on_every_rank(rank: int, world: int) -> None:
    for label, recipe in laws.every_second(list(FEW.items()), 0):
        net = nets.build()
        fq.convert(net, recipe)
        nets.shard(net)
        optimizer = nets.adam(net)
        nets.train_step(net, optimizer, 0)

        def check(what: str) -> None:
            nets.assert_equals_fresh(net, recipe, f"{what}, {label}")

        with torch.no_grad():
            for p in net.parameters():
                p.mul_(1.5)
        check("an in-place edit")
        for p in net.parameters():
            p.to_local().data.mul_(0.9)
        check("a write through .data")
        for p in net.parameters():
            p.to_local().detach().numpy()[...] *= 1.1
        check("a write through numpy")
        exported = net.state_dict()
        with torch.no_grad():
            for value in exported.values():
                (value._local_tensor if isinstance(value, DTensor) else value).mul_(0.7)
        check("writing into an exported state dict")
        net.load_state_dict({k: v * 1.1 for k, v in net.state_dict().items()})
        check("load_state_dict")
        for _ in range(2):
            net(nets.batch()).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            torch.optim.SGD(net.parameters(), lr=0.1, foreach=True).step()
            net.zero_grad()
        check("another optimizer's foreach step")


def test_every_write_reaches_the_next_gather():
    """If false, codes of an earlier master are multiplied (also on ranks whose shard is empty)."""
    run_ranks(4, _mutations_on_every_rank)


def _written_while_gathered(rank: int, world: int) -> None:
    for recipe in (fq.recipes.mxfp8(), fq.recipes.fp8_current(), fq.recipes.identity()):
        net, x = fq.convert(nets.build(), recipe), nets.batch()
        nets.shard(net).eval()
        with torch.no_grad():
            before = net(x)
            assert isinstance(net.head.weight, QuantizedTensor)  # the root's group stays gathered
            state = net.head.weight._pair.owner
            for m in _managed(net):
                if getattr(m.local, "state", None) is state:
                    m.local.mul_(2.0)
            laws.assert_same_bytes(
                net(x), before, f"{recipe}: output of values as they were gathered"
            )
            net.reshard()
            bias = net.head.bias.full_tensor()
            got, want = net(x) - bias, 2 * (before - bias)
            torch.testing.assert_close(
                got, want, msg=lambda text: f"{recipe}: output after a new gather: {text}"
            )
            net.load_state_dict(net.state_dict())
        assert isinstance(net.head.weight, DTensor), "a load reshards"


def test_gathered_codes_of_a_written_shard_are_the_values_as_gathered():
    """If false, a write to a shard spoils what is gathered, or the next gather does not see it;
    plain FSDP2 does so."""
    run_ranks(2, _written_while_gathered)


def _memory(rank: int, world: int) -> None:
    recipe = RECIPES["mxfp8/nvfp4"]
    net = nets.build(hidden=(96, 96, 96))
    fq.convert(net, recipe)
    nets.shard(net)
    optimizer = nets.adam(net)
    states = [m.local.state for m in _managed(net) if isinstance(m.local, WeightShard)]

    def alive() -> int:
        total = 0
        for state in states:
            if state.gathered is not None:
                buffers = list(state.gathered.buffers.values())
                total += sum(
                    t.untyped_storage().size()
                    for b in buffers
                    for t in (*b.outputs, *b.inner_tensors.values())
                )
        return total

    peaks = []
    for block in net.blocks:
        block.register_forward_hook(lambda *_: peaks.append(alive()))
    counts = []
    for step in range(12):
        nets.train_step(net, optimizer, step, rank)
        assert alive() == 0, f"{alive()} bytes of gathered codes outlive the step"
        kept = [s.name for s in states if s.gathered.all_gather_inputs or s.held]
        assert not kept, f"shards' codes of {kept} outlive their gather"
        gc.collect()
        counts.append(sum(1 for o in gc.get_objects() if isinstance(o, torch.Tensor)))
    # A thread of gloo that ends late holds a tensor of its step for a moment.
    assert min(counts[-4:]) <= min(counts[4:-4]), f"tensors alive grow from step to step: {counts}"
    planned = fq.plan(net).weight_bytes
    one_block = max(
        sum(planned[f"blocks.{i}.{n}.weight"][0] for n in ("up", "down")) for i in range(3)
    )
    head = sum(planned["head.weight"])
    assert max(peaks) <= 2 * one_block + head + 64, (
        f"alive at most {max(peaks)}, a block is {one_block}"
    )


def _managed(net):
    from fsdp_quant.tensor.torch_compat import managed_params_of

    return managed_params_of(net)


def test_gathered_bytes_are_freed_and_nothing_grows():
    """If false, codes of one direction stay allocated while the other is multiplied, or leak from
    step to step."""
    run_ranks(2, _memory)


def _laid_out(rank: int, world: int) -> None:
    exact = fq.recipes.nvfp4(scale_rule="fp8_exact")
    for name, recipe in {
        "fp8_block": fq.recipes.fp8_block(),
        "mxfp8": fq.recipes.mxfp8(),
        "nvfp4 exact": exact,
    }.items():
        results = []
        for reshard in (True, False):
            with hopper.emulated() as gpu:
                net = nets.build(hidden=(64, 64)).to(torch.bfloat16)
                fq.convert(net, recipe)
                nets.shard(net, reshard_after_forward=reshard)
                optimizer, kept = nets.adam(net), []
                for _ in range(2):
                    gpu.calls.clear()
                    for micro_batch in range(2):
                        fq.begin_step(micro_batch=micro_batch)
                        y = net(nets.batch(micro_batch, rows=16).to(torch.bfloat16))
                        slots = [
                            m.local.state.gathered.pair
                            for m in _managed(net)
                            if isinstance(m.local, WeightShard)
                        ]
                        kept += [
                            s for one in slots for s in one.operands.values() if not s.is_freed
                        ]
                        net.set_reshard_after_backward(reshard or micro_batch == 1)
                        y.float().square().mean().backward()
                    made = gpu.count("transpose_codes") + gpu.count("anchor_codes")
                    optimizer.step()
                results.append((y, made))
                alive = [s.describe() for s in kept if not s.is_freed]
                assert bool(kept) != reshard and not alive, (
                    f"{name}: operands outlive the codes they were made from: {len(kept)}, {alive}"
                )
        (resharded, many), (held, few) = results
        laws.assert_same_bytes(held, resharded, f"{name}: output")
        assert 0 < few and 2 * few == many, (
            f"{name}: {few} operands made of held codes, {many} of gathers a micro-batch"
        )


@on_cpu
def test_operands_are_made_once_a_gather_and_freed_with_it():
    """If false, each micro-batch transposes the weights again, or the transposes outlive the
    codes."""
    run_ranks(2, _laid_out)


def _autocast(rank: int, world: int) -> None:
    """fp32 parameters; a first forward that autocast does not reach, as in an evaluation."""
    for name in ("mxfp8", "mxfp6") if laws.EVERYTHING else ("mxfp8",):
        seen = []
        for sharded, before in ((False, False), (True, False), (True, True)):
            with hopper.emulated():
                net = fq.convert(nets.build(hidden=(64, 64)), fq.recipes.by_name(name))
                if sharded:
                    nets.shard(net)
                optimizer, x = nets.adam(net), nets.batch(rows=16)
                if before:
                    with torch.no_grad():
                        net(x)
                outputs = []
                for _ in range(2):
                    with torch.autocast("cpu", torch.bfloat16):
                        outputs.append(net(x))
                    outputs[-1].float().square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                seen.append(outputs + list(nets.full_state(net).values()))
                for m in _managed(net) if sharded else []:
                    if isinstance(m.local, WeightShard):
                        pair, plan = m.local.state.gathered.pair, m.local.state.plan
                        wanted = plan.on(torch.bfloat16, m.device)
                        layouts = wanted.resolved(torch.bfloat16, m.device).layouts["weight"]
                        read = {(d, of) for d, of in layouts.items() if of != "compact"}
                        assert set(pair.operands) == read, f"{name}: {set(pair.operands)}"
        for got in seen[1:]:
            for i, (a, b) in enumerate(zip(got, seen[0], strict=True)):
                laws.assert_same_bytes(a, b, f"{name}: tensor {i}")


def _moved(rank: int, world: int) -> None:
    """The guard moves GEMMs between two steps, or while a block is gathered."""
    moves = list(itertools.product(("fprop", "dgrad"), ("anchored", "exact"), (False, True)))
    for product, rung, gathered in moves if laws.EVERYTHING else moves[1::3]:
        seen = []
        for sharded in (False, True):
            with hopper.emulated():
                net = fq.convert(nets.build(hidden=(64, 64)).bfloat16(), fq.recipes.mxfp8())
                if sharded:
                    nets.shard(net)
                optimizer, x = nets.adam(net), nets.batch(rows=16).bfloat16()
                for step in range(3):
                    if step == 1:

                        def move(*_, net=net) -> None:
                            hook.remove()
                            for layer in converted_modules(net).values():
                                layer.runtime.move_to({product: rung})

                        where = net.blocks[1].down if gathered else net
                        hook = where.register_forward_pre_hook(move)
                    net(x).float().square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                seen.append(nets.full_state(net))
        for name, weight in seen[0].items():
            what = f"{product} to {rung}, gathered {gathered}: {name}"
            laws.assert_same_bytes(seen[1][name], weight, what)


@on_cpu
def test_gathers_follow_gemms_that_the_guard_moves():
    """If false, a run under `fully_shard` ends where the guard moves a GEMM: the codes that it
    reads were freed."""
    run_ranks(2, _moved)


@on_cpu
def test_fp32_weights_under_autocast_are_gathered_as_bf16_gemms_read_them():
    """If false, gathers convert codes for activations of the parameters' dtype, and a backward
    finds the codes that it needs freed."""
    run_ranks(2, _autocast)


def _one_launch_a_group(rank: int, world: int) -> None:
    """Three weights per group, one format; gathers of two blocks in the forward, and of both in the
    backward. The root has one weight, which is laid out too."""
    freed = []
    for name, launches in {"fp8_current": (4, 3), "fp8_block": (4, 0), "mxfp8": (4, 0)}.items():
        with hopper.emulated() as gpu:
            net = nn.Sequential(
                *(
                    nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(3)))
                    for _ in range(2)
                )
            )
            net.append(nn.Linear(64, 64, bias=False)).to(torch.bfloat16)
            fq.convert(net, getattr(fq.recipes, name)())
            for block in net[:2]:
                fully_shard(block)
            fully_shard(net)
            optimizer = nets.adam(net)
            states = [m.local.state for m in _managed(net) if isinstance(m.local, WeightShard)]
            of_second = [s for s in states if s.name.startswith("1.")]
            net[1][1].register_full_backward_pre_hook(
                lambda *_: freed.append(  # the group is gathered
                    [s.gathered.pair.columnwise.is_freed for s in of_second]
                )
            )
            for _ in range(2):
                gpu.calls.clear()
                net(
                    nets.batch(rows=16, k=64).to(torch.bfloat16).requires_grad_()
                ).float().square().mean().backward()
                optimizer.step()
            encoded, turned = gpu.count("quantize_group"), gpu.count("relayout_group")
            assert (encoded, turned) == launches, (
                f"{name}: {encoded} launches encode 4 gathers, {turned} lay 3 out"
            )
            assert freed.pop() == [True] * 3, (
                f"{name}: codes that no product reads lie beside their layout"
            )


@on_cpu
def test_a_gather_is_encoded_and_laid_out_by_one_launch():
    """If false, the host pays for every weight, and codes and their transposes lie beside each
    other."""
    run_ranks(2, _one_launch_a_group)


AGAIN = {  # recipe, quantized parameters: all, or the first of each group
    "fp8_current": (fq.recipes.fp8_current(), False),
    "fp8_current, quantized": (fq.recipes.fp8_current(), True),
    "fp8_delayed": (fq.recipes.fp8_delayed(), False),
    "fp8_row": (fq.recipes.fp8_row(), False),
    "fp8_block": (fq.recipes.fp8_block(), False),
    "mxfp8": (fq.recipes.mxfp8(), False),
    "mxfp8/nvfp4": (fq.recipes.hybrid("mxfp8", "nvfp4"), False),
    "nvfp4, quantized": (fq.recipes.nvfp4(), True),
    "mxfp8, some quantized": (fq.recipes.mxfp8(), "up"),
}


def _eventful(
    label: str, rank: int, anew: bool
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor], collections.Counter]:
    """Outputs, weights, and how often something was written again, of steps between which things
    happen; anew: nothing is."""
    recipe, quantized = AGAIN[label]
    again = collections.Counter()
    with pytest.MonkeyPatch.context() as patched:
        for owner, name in (
            (root_statistics.Collective, "replay"),
            (gather_group.GatherGroup, "is_of"),
        ):

            def counted(self, *args, original=getattr(owner, name), name=name):
                done = (not anew or name == "is_of") and original(self, *args)
                again[name] += done
                return done

            patched.setattr(owner, name, counted)
        with fq.quantized_model_init(recipe) if quantized else contextlib.nullcontext():
            net = nets.build(hidden=(128, 96), k=64, out=64).to(torch.bfloat16)
            fq.convert(net, recipe, skip=["down", "head"] if quantized == "up" else [])
        if quantized == "up":
            fq.convert(net, recipe)
        nets.shard(net)
        optimizer, outputs = (
            fq.optim.FusedAdam(net.parameters(), lr=1e-2) if quantized else nets.adam(net),
            [],
        )

        def forward(at: int) -> torch.Tensor:
            outputs.append(net(nets.batch(at, rank=rank, k=64).to(torch.bfloat16)))
            return outputs[-1]

        for step in range(7):
            for local in (
                m.local for m in _managed(net) if anew and isinstance(m.local, FSDPHooks)
            ):
                local.state.gathered = None
            with fq.token_offset(0):
                fq.begin_step(step)
                if step == 2:  # a hand writes weights
                    with torch.no_grad():
                        net.blocks[0].up.weight.mul_(1.5)
                    # codes of a quantized parameter change with events that ranks share
                    if quantized:
                        fq.sync(net)
                if step == 3:  # from here on a weight stays as it is, beside one that does not
                    net.blocks[0].up.weight.requires_grad_(False)
                if step == 5:
                    with torch.no_grad():  # a forward alone
                        forward(50)
                for micro in range(2 if step in (1, 4) else 1):
                    forward(step * 10 + micro).float().square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return outputs, nets.full_state(net), again


def _made_again(rank: int, world: int) -> None:
    few = ("fp8_current", "nvfp4, quantized", "mxfp8, some quantized")
    for label in AGAIN if laws.EVERYTHING else few:
        with hopper.emulated() if DEVICE == "cpu" else contextlib.nullcontext():
            (got, weights, again), (want, wanted, _) = (
                _eventful(label, rank, anew) for anew in (False, True)
            )
        for i, pair in enumerate(zip(got, want)):
            laws.assert_same_bytes(*pair, f"{label}: output {i}")
        for name, value in wanted.items():
            laws.assert_same_bytes(weights[name], value, f"{label}: {name}")
        shares = any(
            e.fmt.spans_tensor or e.fmt.dims(e.direction)[0] for e in _encodings(AGAIN[label][0])
        )
        assert again["is_of"] >= 12 and (not shares or again["replay"] >= 4), f"{label}: {again}"


def _encodings(recipe: fq.Recipe):
    return recipe.hybrid(Role("linear", "weight", "")).encodings.values()


def test_a_gather_that_repeats_the_last_one_is_as_one_made_anew():
    """If false, buffers, launches or statistics that are written again hold what another pass or
    recipe left there."""
    run_ranks(2, _made_again)


def _let_go(rank: int, world: int) -> None:
    kept = []
    for recipe in (fq.recipes.mxfp8(), fq.recipes.identity()):
        net = nets.build()
        fq.convert(net, recipe)
        nets.shard(net)
        optimizer = nets.adam(net)
        nets.train_step(net, optimizer, 0, rank)
        kept += map(weakref.ref, [net, *net.parameters()])
        del net, optimizer
    gc.collect()
    alive = [type(o).__name__ for ref in kept if (o := ref()) is not None]
    assert not alive, f"alive after their model: {alive}"


def test_a_model_that_is_let_go_is_freed():
    """If false, the next model of a process finds no memory."""
    run_ranks(2, _let_go)


def _mixed_precision(rank: int, world: int) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    recipe = fq.recipes.hybrid("mxfp8", "identity")
    net = nets.build(hidden=(16,))
    weight = {n: p.detach().clone() for n, p in net.named_parameters()}
    fq.convert(net, recipe)
    nets.shard(
        net, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    )
    with nets.recorded_weights() as seen:
        y = net(nets.batch(rows=4))
        y.float().square().mean().backward()
    assert y.dtype is torch.bfloat16 and net.head.weight.grad.dtype is torch.float32
    for direction, storage, _ in seen:
        name = next(n for n, w in weight.items() if tuple(w.shape) == tuple(storage.shape))
        want = nets.expected_storages(recipe, name, weight[name], torch.bfloat16)[direction]
        laws.assert_same_storage(storage, want, f"{name} {direction}")
        assert storage.dtype is torch.bfloat16


def test_mixed_precision_policy_sets_the_dtype_of_identity_gathers():
    """If false, the high-precision side of a hybrid travels in fp32, or gradients lose their reduce
    dtype."""
    run_ranks(2, _mixed_precision)


def _manual_unshard(rank: int, world: int) -> None:
    net = nets.build()
    whole = net.head.weight.detach().clone()
    recipe = RECIPES["mxfp8/nvfp4"]
    fq.convert(net, recipe)
    nets.shard(net)
    net.unshard()
    for direction, want in nets.expected_storages(recipe, "head", whole).items():
        laws.assert_same_storage(
            net.head.weight.storage_for(direction), want, f"manual unshard, {direction}"
        )
    want = nets.expected_storages(recipe, "head", whole)[fq.ROWWISE].dequantize(torch.float32)
    laws.assert_same_bytes(net.head.weight.dequantize(), want, "dequantize")
    net.reshard()
    assert isinstance(net.head.weight, DTensor)


def test_manual_unshard_gathers_both_directions():
    """If false, code that unshards by hand reads freed memory."""
    run_ranks(3, _manual_unshard)


def delayed_sides(role):
    """Both directions of a hybrid, each with its history."""
    e5m2 = format_of("fp8_tensor", element="e5m2")
    return fq.HybridQuantizer(
        *(fq.Quantizer(f, scaling=fq.DelayedScaling(4)) for f in ("fp8_tensor", e5m2))
    )


class _Three(nn.ModuleList):
    """Two layers one after the other, and one that not every call runs."""

    def forward(self, x: torch.Tensor, extra: bool) -> torch.Tensor:
        y = self[1](self[0](x))
        return y + self[2](x * 100).sum() if extra else y


def _shared_amaxes(rank: int, world: int) -> None:
    """Each rank has its rows of the batch, and a layer that it alone uses; one process has them
    all."""
    calls, reduce = [], training_state.reduce_amaxes

    def counted(*args):
        calls.append(1)
        return reduce(*args)

    def net() -> nn.Module:
        torch.manual_seed(0)
        layers = _Three([nn.Linear(40, 56), nn.Linear(56, 24), nn.Linear(40, 56)])
        layers[1].weight.requires_grad_(False)
        return fq.convert(layers, fq.CustomRecipe(delayed_sides))

    training_state.reduce_amaxes = counted
    whole, sharded = net(), net()
    for layer in (sharded[0], sharded[1]):
        fully_shard(layer)
    fq.share_amaxes(sharded)
    for i in range(4):
        x, dy = (laws.values(12, n, seed=9 * i + n, dtype=torch.float32) for n in (40, 24))
        # the largest, in a first step too, whose scales are of a rank's own rows
        for rows in (x, dy):
            rows *= (torch.arange(12) + 1 + i)[:, None]
        mine = slice(rank * 12 // world, (rank + 1) * 12 // world)
        whole(x, True).backward(dy)
        sharded(x[mine], rank == 0 and i == 0).backward(dy[mine])
    want, got = (fq.state_dict(m)["histories"] for m in (whole, sharded))
    for history in (*want.values(), *got.values()):
        # the step that runs is shared when the next one begins
        history["amaxes"] = history["amaxes"][1:]
    sides = (
        "0.input.rowwise",
        "0.input.columnwise",
        "0.grad_output.columnwise",
        "1.input.rowwise",
        "1.grad_output.rowwise",
    )
    for key in sides:
        for name, tensor in want[key].items():
            laws.assert_same_bytes(got[key][name], tensor, f"{key} {name}")
    shared = {
        key: (h["amaxes"].tolist(), h["enc"].tolist())
        for key, h in got.items()
        if "2.weight" not in key
    }
    return shared, len(calls)


def test_shared_amaxes_are_those_of_the_whole_batch():
    """If false, delayed scales depend on how a batch is divided over ranks, or a rank waits for a
    layer that it did not use."""
    (first, calls), (second, _) = run_ranks(2, _shared_amaxes)
    assert first == second and first["2.input.rowwise"][1] != [0.0]
    assert calls == 3


def _histories(rank: int, world: int) -> None:
    first, then = (
        fq.recipes.fp8_delayed(length=8),
        fq.recipes.fp8_delayed(length=2, backward_override="dequantized"),
    )

    def run(recipe: fq.Recipe, quantized: bool, switch: bool) -> list:
        context = fq.quantized_model_init(recipe) if quantized else contextlib.nullcontext()
        torch.manual_seed(0)
        with context:
            net = fq.convert(nn.Sequential(nn.Linear(32, 17)), recipe)
        fully_shard(net)
        optimizer, seen = fq.optim.FusedAdam(net.parameters(), lr=0.0), []
        for step, scale in enumerate((4.0, 16.0, 0.5, 2.0, 1.0)):
            if switch and step == 3:
                fq.set_recipe(net, then)
            fq.begin_step(step)
            with torch.no_grad():  # alike on every rank and in every recipe
                for p in net.parameters():
                    p.mul_(1.5)
            fq.sync(net)
            net(nets.batch(step, rank=rank, k=32) * scale).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(fq.state_dict(net))
        return seen

    for quantized in (False, True):
        got, want = run(first, quantized, True), run(then, quantized, False)
        for step in (3, 4):
            assert got[step]["codes"] == want[step]["codes"], (quantized, step)
            assert got[step]["histories"].keys() == want[step]["histories"].keys()
            for side, history in want[step]["histories"].items():
                for part, tensor in history.items():
                    laws.assert_same_bytes(
                        got[step]["histories"][side][part], tensor, f"{quantized} {side} {part}"
                    )


def test_set_recipe_continues_histories_of_sharded_weights():
    """If false, ranks begin delayed scales of weights afresh when another recipe has the same."""
    run_ranks(2, _histories)
