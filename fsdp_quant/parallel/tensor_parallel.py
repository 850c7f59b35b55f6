# SPDX-License-Identifier: Apache-2.0
"""Styles for `parallelize_module`, and linear layers of trainers that have process groups in place
of meshes.

Styles come before `fully_shard`, and before or after `fq.convert`; parameters may be quantized
ones. torch.compile traces the layers into its graphs, with their collectives
(`linear.program`).
"""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor import parallel as styles
from torch.distributed.tensor.placement_types import Placement as Layout

from ..context import quantized_init_recipe
from ..counters import bytes_of
from ..linear.cut import Layouts, TensorParallel
from ..linear.linear import Linear
from ..linear.transport import count_high_precision_gather
from ..models.steps import name_of
from ..ops.rng import own_name
from ..recipe import Recipe, as_recipe, identity
from ..tensor import torch_compat
from ..tensor.agreement import raises_on_all_ranks, recipe_text, weight_text
from ..tensor.quantized_tensor import QuantizedTensor
from ..tensor.quantized_weight import QuantizedWeight
from ..tensor.weight_state import values_of

SequenceParallel = styles.SequenceParallel
_SERIAL = itertools.count()


def check_one_axis(name: str, style: str, mesh: DeviceMesh, kind: str, axis: str) -> None:
    """Raise ValueError for a mesh of more axes than a style cuts modules over."""
    if mesh.ndim != 1:
        raise ValueError(
            f"{name}: {style} needs a mesh of one axis, got {mesh.ndim} ({mesh.mesh_dim_names}); "
            f'pass the axis of {kind}, such as mesh["{axis}"]'
        )


def _check_divides(name: str, dim: int, features: int, ranks: int) -> None:
    if features % ranks:
        raise ValueError(
            f"{name} cuts {'in' if dim else 'out'}_features={features} over {ranks} ranks, which "
            f"do not divide it; choose a multiple of {ranks}, or leave the layer whole"
        )


class _Style:
    """What both styles add to torch's: layers of this library take plain inputs, and gather them as
    codes themselves.

    recipe:  of an nn.Linear that is to become an `fq.Linear` here; an `fq.Linear` has its own, and
             one may be converted later.
    """

    input_layouts: tuple[Layout, ...]
    output_layouts: tuple[Layout, ...]
    use_local_output: bool
    _dim: int

    def __init__(self, *, recipe: Recipe | str | None = None, **layouts):
        super().__init__(**layouts)
        self.recipe = None if recipe is None else as_recipe(recipe, type(self).__name__, Recipe)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        style, name = type(self).__name__, name_of(module)
        check_one_axis(name, style, device_mesh, "tensor parallelism", "tp")
        if isinstance(module, nn.Linear):
            fact = f"{weight_text(module.weight)} of {recipe_text(module)}, {style}"
            with raises_on_all_ranks(device_mesh.get_all_groups(), {f"{name}.weight": fact}):
                self._check(name, module, device_mesh)
            # an nn.Linear has it as fq.convert makes it an fq.Linear
            vars(module)["parallel"] = Layouts(
                self.input_layouts[0], self.output_layouts[0], self.use_local_output
            )
        result = super()._apply(module, device_mesh)  # pyright: ignore[reportAttributeAccessIssue]
        if self.recipe is not None and type(module) is nn.Linear:
            module.__class__ = Linear
            if isinstance(module, Linear):
                module.make_quantized(self.recipe, f"parallel.{next(_SERIAL)}")
        return result

    def _check(self, name: str, module: nn.Linear, mesh: DeviceMesh) -> None:
        weight, style = module.weight, type(self).__name__
        if isinstance(weight, DTensor):
            remedy = f"apply one style to a layer, and {style} to none before"
            if any(m.registered is weight for m in torch_compat.all_managed_params()):
                remedy = f"apply {style} before fully_shard"
            raise ValueError(f"{name}.weight is a DTensor {weight.placements} already; {remedy}")
        if type(weight) is QuantizedTensor:
            raise ValueError(
                f"{name}.weight is codes of fq.freeze, which {style} does not cut; call "
                "fq.unfreeze, and fq.freeze after fully_shard"
            )
        if isinstance(weight, QuantizedWeight) and weight.device.type != "meta":
            weight.check_not_taken()
        features = module.in_features if self._dim else module.out_features
        _check_divides(f"{name}: {style}", self._dim, features, mesh.size())

    def _partition_linear_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        if not isinstance(module, Linear):
            super()._partition_linear_fn(name, module, device_mesh)  # pyright: ignore[reportAttributeAccessIssue]
            return
        weight, plain = module.weight, nn.Linear(1, 1, bias=False, device="meta")
        plain.weight = nn.Parameter(values_of(weight).detach(), weight.requires_grad)
        plain.register_parameter("bias", module.bias)
        super()._partition_linear_fn(name, plain, device_mesh)  # pyright: ignore[reportAttributeAccessIssue]
        # Not by setattr, by which fully_shard registers shards, nor as torch's styles do: the state
        # is another one.
        nn.Module.register_parameter(module, "weight", plain.weight)
        module.bias = plain.bias
        before = module.runtime.weight_state
        module.attach_state(type(before))
        # those that the counter of steps rolls
        module.runtime.weight_state.histories |= before.histories
        module.prepare_graphs()

    @staticmethod
    def _prepare_output_fn(output_layouts, use_local_output, mod, outputs, device_mesh):
        if not isinstance(outputs, DTensor):
            return outputs  # in the output layout already
        return styles.ColwiseParallel._prepare_output_fn(
            output_layouts, use_local_output, mod, outputs, device_mesh
        )

    @staticmethod
    def _prepare_input_fn(input_layouts, desired_input_layouts, mod, inputs, device_mesh):
        if isinstance(mod, Linear):
            return inputs[0]
        x = styles.ColwiseParallel._prepare_input_fn(
            input_layouts, desired_input_layouts, mod, inputs, device_mesh
        )
        placements = tuple(desired_input_layouts)
        return x if x.placements == placements else x.redistribute(placements=placements)


class ColwiseParallel(_Style, styles.ColwiseParallel):
    """torch's style, W [N / R, K]; an input that is cut along the sequence is gathered as codes.

    recipe:  turns an nn.Linear into an `fq.Linear`; without it the layer may be one, or be
             converted later.
    input_layouts:  Replicate() (default), or Shard(dim) of the sequence. A DTensor has its own.

    Raises ValueError, on every rank, for a mesh of more axes, a layer under `fully_shard`, and
    features that R does not divide.
    """

    _dim = 0


class RowwiseParallel(_Style, styles.RowwiseParallel):
    """torch's style, W [N, K / R]; with output_layouts=Shard(dim) of the sequence, gradients are
    gathered as codes.

    recipe and errors: as of `ColwiseParallel`.
    """

    _dim = 1


class PrepareModuleInput(styles.PrepareModuleInput):
    """torch's style; an input that is cut along the sequence and desired whole stays a DTensor that
    is cut.

    Layers of this library that are given it gather its codes once for all of them (q, k and v; gate
    and up), and the sum of their gradients is scattered once; anything else redistributes it when
    it is used. With use_local_output=True it is gathered in high precision, which is counted.
    Arguments and shapes are torch's.
    """

    def _prepare_input_arg(self, input, mesh, input_layout, desired_layout):
        is_gathered = (
            isinstance(input, Tensor)
            and isinstance(input_layout, Shard)
            and input_layout.dim % input.dim() != input.dim() - 1
            and desired_layout is not None
            and desired_layout.is_replicate()
        )
        if is_gathered and self.use_local_output:
            ranks = 1 if isinstance(input, DTensor) else mesh.size()
            count_high_precision_gather(bytes_of(input) * ranks)
        elif is_gathered:
            desired_layout = input_layout
        return super()._prepare_input_arg(input, mesh, input_layout, desired_layout)


# Without DTensor #


class _ParallelLinear(Linear):
    """A rank's part of a linear layer, in plain parameters; values are those of nn.Linear of the
    same seed, cut."""

    _dim: int

    def __init__(
        self,
        in_features: int,
        out_features: int,
        group: dist.ProcessGroup,
        bias: bool = True,
        sequence_dim: int | None = None,
        device=None,
        dtype=None,
        *,
        recipe: Recipe | str | None = None,
        name: str | None = None,
    ):
        name = own_name(name, "linear")
        if not isinstance(group, dist.ProcessGroup):
            raise ValueError(
                f"{name}: group is {group!r}; wanted the process group of tensor parallelism: call "
                "torch.distributed.init_process_group, and pass mesh.get_group()"
            )
        dim, rank, ranks = self._dim, group.rank(), group.size()
        _check_divides(
            f"{name}: {type(self).__name__}", dim, in_features if dim else out_features, ranks
        )
        nn.Linear.__init__(self, in_features, out_features, bias, device, dtype)
        with torch.no_grad():
            local = self.weight.chunk(ranks, dim)[rank]
            self.weight = nn.Parameter(local.clone(memory_format=torch.contiguous_format))
            if self.bias is not None and dim == 0:
                self.bias = nn.Parameter(self.bias.chunk(ranks)[rank].clone())
        self.out_features, self.in_features = self.weight.shape
        self.parallel = TensorParallel(group, dim == 0, sequence_dim)
        recipe = recipe or quantized_init_recipe()
        self.make_quantized(recipe or identity(), name)
        self.runtime.chosen = recipe is not None
        self.runtime.weight_state.tensor_group = group
        self.runtime.weight_state.tensor_dim = dim
        self.prepare_graphs()


class ColumnParallelLinear(_ParallelLinear):
    """y [.., S, N / R] of x [.., S / R, .., K], or of a whole x; W [N / R, K], bias [N / R].

    in_features, out_features:  of the whole layer.
    group:                      of tensor parallelism; every rank must call it alike.
    sequence_dim:               that x is cut along (None: x is whole; the gradient of x is then
                                summed over the ranks).

    Raises ValueError where R does not divide out_features.
    """

    _dim = 0


class RowParallelLinear(_ParallelLinear):
    """y [.., S / R, .., N], or whole, of x [.., S, K / R]; W [N, K / R], bias [N], added once.

    sequence_dim:  that y is cut along (None: y is whole). The gradient of bias is that of all rows,
                   on every rank.

    Other arguments: as of `ColumnParallelLinear`. Raises ValueError where R does not divide
    in_features, or a sequence.
    """

    _dim = 1
