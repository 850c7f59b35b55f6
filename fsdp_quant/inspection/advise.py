# SPDX-License-Identifier: Apache-2.0
"""`advise`: find the cheapest recipe within a loss budget, from the error that each layer adds.

Quantize one layer in one candidate format and one direction; keep the rest in high precision:

    forward    gap(layer, F)   = |mean over the batches of loss(hybrid(F, identity)) -
                               loss(identity)|
    backward   error(layer, B) = |g(hybrid(identity, B)) - g| / |g|, g the gradient of all
               parameters

Choose each direction independently. Start with the cheapest candidate in every layer. Then move
the layer with the largest reduction per cost to a better format, until the sum of gaps is within
`budget` and the root of the sum of squared errors is within `gradient_error`. Measure the whole
recipe. If it exceeds a budget, scale the predicted budget down by the excess and choose again.

cost, relative to bf16:

    "time"   seconds on paper: each GEMM at the vendor's peak of its path (`gemm_domain`), and each
             operand that is quantized read and written once at the peak of memory. No launches,
             collectives, or work outside of linear layers: it ranks candidates, and predicts no
             step. A layer that is too small to gain by codes stays in high precision.
    "bytes"  per operand element of the three GEMMs: (F + 2 B) / 6. For memory and gathers.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..context import STEP
from ..counters import counters
from ..families import family_of
from ..formats import IDENTITY
from ..linear.plan import build_plan
from ..linear.products import PRODUCTS
from ..linear.training_steps import begin_step
from ..models.convert import convert
from ..models.progress import progress
from ..models.set_recipe import converted_units, set_recipe
from ..ops.capability import arch_of, place_of
from ..options import choice, integer
from ..recipe import PerLayer, by_name, identity, names, per_layer
from ..roles import Selector, matches
from ..tensor import torch_compat

HIGH = IDENTITY.name
CANDIDATES = ("nvfp4", "fp8_block", "mxfp8")
TOKENS = 8192
# A backward in mxfp8 has 0.03 in the first step of examples/train_lm.py and 0.006 after 60 steps,
# one in nvfp4 0.11 and 0.03; that of the model of docs/diverging_run.md in nvfp4 has 0.25.
GRADIENT_ERROR = 0.1
# bf16 FLOP and bytes of memory per second, as vendors print them: A100, L40S, H100, B200, RTX 5090
PEAKS = {"sm_80": (312e12, 2e12), "sm_89": (362e12, 0.86e12), "sm_90a": (989e12, 3.35e12)}
PEAKS |= {"sm_100f": (2250e12, 8e12), "sm_120f": (209e12, 1.8e12)}
ROUNDS = 8  # recipes to measure before falling back to high precision

Loss = Callable[[nn.Module, object], Tensor]
_Costs = dict[str, dict[str, float]]  # layer -> family -> cost


@dataclass(frozen=True)
class Choice:
    """The formats of one layer. gaps, errors: candidate -> error that it adds. costs: of the layer,
    and in high precision."""

    layer: str
    elements: int
    gaps: dict[str, float]
    errors: dict[str, float]
    forward: str
    backward: str
    costs: tuple[float, float]

    @property
    def cost(self) -> float:
        return self.costs[0] / self.costs[1]


@dataclass(frozen=True)
class Advice:
    """A recipe and the measurements behind it.

    recipe:  for `fq.convert` and `fq.set_recipe`; code: the same as a Python expression.
    predicted, measured:  (loss gap, relative error of the gradient) of the whole recipe on the
                          batches.
    loss:    in high precision.
    cost:    of all layers, relative to bf16. unit: of it.
    """

    recipe: PerLayer
    code: str
    choices: tuple[Choice, ...]
    loss: float
    predicted: tuple[float, float]
    measured: tuple[float, float]
    budget: tuple[float, float]
    unit: str

    @property
    def cost(self) -> float:
        chosen, high = (sum(of) for of in zip(*(c.costs for c in self.choices)))
        return chosen / high

    def __str__(self) -> str:
        candidates = list(self.choices[0].gaps)
        width = max(len(c.layer) for c in self.choices)
        columns = [*(f"gap {f}" for f in candidates), *(f"error {f}" for f in candidates)]
        lines = [
            f"{'layer':{width}}  {'forward/backward':20}{'cost':>6}  "
            + "  ".join(f"{c:>14}" for c in columns)
        ]
        for c in self.choices:
            numbers = [*(c.gaps[f] for f in candidates), *(c.errors[f] for f in candidates)]
            chosen = f"{c.forward}/{c.backward}"
            lines.append(
                f"{c.layer:{width}}  {chosen:20}{c.cost:6.2f}  "
                + "  ".join(f"{n:14.2e}" for n in numbers)
            )
        labels = f"loss gap over {self.loss:.6g}", "gradient error"
        for label, *of in zip(labels, self.measured, self.predicted, self.budget):
            measured, predicted, budget = (f"{number:.3g}" for number in of)
            lines.append(f"{label}: {measured} measured, {predicted} predicted, budget {budget}")
        lines.append(f"linear layers: {self.cost:.2f} of bf16's {self.unit}")
        return "\n".join([*lines, self.code])


def advise(
    model: nn.Module,
    batches: Iterable,
    budget: float = 0.01,
    candidates: Sequence[str] = CANDIDATES,
    loss: Loss | None = None,
    gradient_error: float = GRADIENT_ERROR,
    skip: Selector | Iterable[Selector] = (),
    say: Callable[[str], object] = print,
    cost: str = "time",
    on: str | None = None,
    tokens: int = TOKENS,
) -> PerLayer:
    """Find the cheapest `per_layer` recipe within `budget` of high precision's loss, and report its
    costs through `say`.

    model:           before or after `fq.convert`, in one process; it is copied, and stays as it is.
    batches:         a few; each is measured 1 + 2 x layers x candidates times.
    budget:          of the loss on the batches, in its units.
    candidates:      families of formats ("mxfp8", "nvfp4", "fp8_block", ...), any number; high
                     precision is always one.
    loss:            (model, batch) -> scalar. Default: `.loss` of what the model returns for the
                     batch.
    gradient_error:  budget of the gradient's relative error.
    skip:            as of `fq.convert`.
    cost:            "time" on paper, or "bytes" of operands: see `inspection.advise`.
    on, tokens:      for "time": the GPU ("sm_90a", docs/targets.md; default: this machine's, else
                     "sm_90a"), and the tokens of a rank's micro-batch.

    Runs in evaluation mode, without dropout. `study` returns the numbers too.
    Raises ValueError for a model under `fully_shard`, no batches, unknown candidates, and a loss
    that is no finite number.

    >>> model, batches = nn.Sequential(nn.Linear(64, 32)), [torch.randn(16, 64)]
    >>> loss = lambda model, x: model(x).square().mean()
    >>> options = {"candidates": ["mxfp8"], "say": lambda line: None}
    >>> recipe = fq.advise(model, batches, budget=1.0, loss=loss, **options)
    >>> model = fq.convert(model, recipe)
    """
    advice = study(model, batches, budget, candidates, loss, gradient_error, skip, cost, on, tokens)
    say(str(advice))
    return advice.recipe


def study(
    model: nn.Module,
    batches: Iterable,
    budget: float = 0.01,
    candidates: Sequence[str] = CANDIDATES,
    loss: Loss | None = None,
    gradient_error: float = GRADIENT_ERROR,
    skip: Selector | Iterable[Selector] = (),
    cost: str = "time",
    on: str | None = None,
    tokens: int = TOKENS,
) -> Advice:
    """Choose the recipe of `advise`, and return it with its measurements."""
    batches = list(batches)
    candidates = [c for c in dict.fromkeys(candidates) if c != HIGH]
    for family in candidates:
        family_of(family)
    if not batches or not candidates:
        raise ValueError(
            f"advise got {len(batches)} batches and the candidates {candidates}; wanted at least "
            f"one of each"
        )
    if budget < 0 or gradient_error < 0:
        raise ValueError(
            f"advise: budgets are not negative, got budget={budget}, "
            f"gradient_error={gradient_error}"
        )
    if torch_compat.managed_params_of(model):
        raise ValueError(
            "advise copies the model, and fully_shard has it: call it in one process, before "
            "fully_shard"
        )
    choice("time", "bytes").read("advise: cost", cost)
    arch = _arch(on) if cost == "time" else None
    tokens = integer(1).read("advise: tokens", tokens)
    probe = copy.deepcopy(model).eval()
    with counters.uncounted():
        if converted_units(probe):
            set_recipe(probe, identity())
        else:
            convert(probe, identity(), skip)
        begin_step(STEP.step, STEP.micro_batch, model=probe)  # and stays there
        units, families = converted_units(probe), [*candidates, HIGH]
        costs = [
            {n: {f: _cost(of, f, step, arch, tokens) for f in families} for n, of in units.items()}
            for step in range(2)
        ]
        found = _Study(probe, batches, loss or _own_loss, costs)
        return found.advice(budget, gradient_error, arch and f"time on {arch}" or "bytes")


class _Study:
    def __init__(self, probe: nn.Module, batches: list, loss: Loss, costs: list[_Costs]):
        self.probe, self.batches, self.loss = probe, batches, loss
        self.parameters = [p for p in probe.parameters() if p.requires_grad]
        units = converted_units(probe)
        self.elements = {n: sum(m.weight.numel() for m in of) for n, of in units.items()}
        self.forward, self.backward = costs
        self.base = self._mean_loss()
        if not math.isfinite(self.base):
            raise ValueError(
                f"advise: the loss in high precision is {self.base}; start from weights and "
                f"batches whose loss is finite"
            )

    def advice(self, budget: float, gradient_error: float, unit: str) -> Advice:
        gaps, errors = ({name: {HIGH: 0.0} for name in self.elements} for _ in range(2))
        pairs = [(n, family) for n, of in self.forward.items() for family in of if family != HIGH]
        for name, family in progress(pairs, "fq.advise: forward"):
            gaps[name][family] = abs(self._gap({name: (family, HIGH)}))
        backwards = [{name: (HIGH, family)} for name, family in pairs]
        for (name, family), error in zip(pairs, self._errors(backwards)):
            errors[name][family] = error
        limits = budgets = budget, gradient_error
        for _ in range(ROUNDS):
            forward = self._chosen(gaps, limits[0], sum, self.forward)
            backward = self._chosen(errors, limits[1], lambda e: math.hypot(*e), self.backward)
            formats = {name: (forward[name], backward[name]) for name in self.elements}
            predicted = (
                sum(gaps[n][f] for n, (f, _) in formats.items()),
                math.hypot(*(errors[n][b] for n, (_, b) in formats.items())),
            )
            (error,) = self._errors([{n: (HIGH, b) for n, (_, b) in formats.items()}])
            measured = abs(self._gap(formats)), error
            if measured[0] <= budget and measured[1] <= gradient_error:
                break
            limits = tuple(
                0.9 * p * b / m if m > b else limit
                for limit, p, b, m in zip(limits, predicted, budgets, measured)
            )
        else:
            formats = dict.fromkeys(self.elements, (HIGH, HIGH))
            predicted = measured = 0.0, 0.0
        recipe, code = _recipe(formats)
        choices = []
        for n, (f, b) in formats.items():
            forward, backward = self.forward[n], self.backward[n]
            costs = forward[f] + backward[b], forward[HIGH] + backward[HIGH]
            choices.append(Choice(n, self.elements[n], gaps[n], errors[n], f, b, costs))
        return Advice(recipe, code, tuple(choices), self.base, predicted, measured, budgets, unit)

    def _chosen(
        self, harms: dict[str, dict[str, float]], budget: float, total: Callable, costs: _Costs
    ) -> dict[str, str]:
        """Choose a family per layer: start with the cheapest, then move the layer with the largest
        reduction of `harms` per cost."""
        chosen = {n: min(of, key=lambda f: (of[f], harms[n][f])) for n, of in costs.items()}
        while total([harms[n][f] for n, f in chosen.items()]) > budget:
            moves = [
                (gain / max(costs[name][better] - costs[name][family], 1e-18), name, better)
                for name, family in chosen.items()
                for better in costs[name]
                if (gain := harms[name][family] - harms[name][better]) > 0
            ]
            if not moves:
                break  # what is left harms no more than high precision
            _, name, better = max(moves)
            chosen[name] = better
        return chosen

    def _apply(self, formats: Mapping[str, tuple[str, str]]) -> None:
        of_all = {name: formats.get(name, (HIGH, HIGH)) for name in self.elements}
        set_recipe(self.probe, _recipe(of_all)[0])

    def _gap(self, formats: Mapping[str, tuple[str, str]]) -> float:
        self._apply(formats)
        gap = self._mean_loss() - self.base
        return gap if math.isfinite(gap) else math.inf

    def _errors(self, tried: Sequence[Mapping[str, tuple[str, str]]]) -> list[float]:
        """Relative error of the gradient of all parameters and batches, per entry of `tried`."""
        noise, signal = [0.0] * len(tried), 0.0
        for batch in self.batches:
            exact = self._gradient({}, batch)
            signal += sum(float(g.double().square().sum()) for g in exact)
            for i, formats in enumerate(progress(tried, "fq.advise: backward")):
                pairs = zip(self._gradient(formats, batch), exact)
                noise[i] += sum(float((g - e).double().square().sum()) for g, e in pairs)
        errors = [math.sqrt(squares / signal) if signal else 0.0 for squares in noise]
        return [error if math.isfinite(error) else math.inf for error in errors]

    def _gradient(self, formats: Mapping[str, tuple[str, str]], batch: object) -> list[Tensor]:
        self._apply(formats)
        gradients = torch.autograd.grad(self._scalar(batch), self.parameters, allow_unused=True)
        return [g for g in gradients if g is not None]

    def _mean_loss(self) -> float:
        with torch.no_grad():
            return sum(float(self._scalar(batch)) for batch in self.batches) / len(self.batches)

    def _scalar(self, batch: object) -> Tensor:
        loss = self.loss(self.probe, batch)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ValueError(
                f"advise: loss(model, batch) returned {type(loss).__name__}; wanted a tensor of "
                f"one number"
            )
        return loss.reshape(())


def call_with(model: nn.Module, batch: object) -> Any:
    """Return what the model returns for a batch: a mapping of keywords, a tuple or list of
    arguments, or one argument."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def _own_loss(model: nn.Module, batch: object) -> Tensor:
    output = call_with(model, batch)
    if getattr(output, "loss", None) is None:
        raise ValueError(
            f"advise: the model returned {type(output).__name__} without a loss; pass loss=lambda "
            f"model, batch: ..."
        )
    return output.loss


def _arch(on: str | None) -> str:
    """Return the GPU to estimate for. Raises ValueError for one without peaks."""
    default = "cuda" if torch.cuda.is_available() else "sm_90a"
    arch = arch_of(place_of(default if on is None else on))
    if arch not in PEAKS:
        raise ValueError(f"advise: on={arch!r} has no peaks; wanted one of {', '.join(PEAKS)}")
    return arch


def _cost(layers: Sequence, family: str, step: int, arch: str | None, tokens: int) -> float:
    """Return what a family costs in the forward (step 0) or the backward (1) of layers, of which
    each has its share of the tokens. arch: None counts bytes."""
    (n, k), count = layers[0].runtime.weight_state.shape[-2:], len(layers)
    if arch is None:
        return family_of(family).vector.bytes_per_element() * n * k * count * (1 + step)
    recipe = by_name(f"{HIGH}/{family}" if step else f"{family}/{HIGH}")
    planned = build_plan(recipe, "linear").on(torch.bfloat16, arch)
    sizes = {"input": tokens * k, "weight": n * k * count, "grad_output": tokens * n}
    (flops, bandwidth), seconds = PEAKS[arch], 0.0
    for product in PRODUCTS[1:] if step else PRODUCTS[:1]:
        domain, _ = planned.domain(product, torch.bfloat16, arch)
        operands, is_fast = (product.a, product.b), domain in ("native", "anchored")
        coded = [o for o in operands if planned.operand(*o).is_quantized]
        in_4_bits = domain == "native" and planned.operand(*product.a).bits == 4
        rate = (4 if in_4_bits else 2) if coded and is_fast else 1
        rate = 1 / 16 if domain == "reference" else rate  # a product in fp32
        seconds += 2 * tokens * n * k / (flops * rate)
        for slot, direction in coded:
            moved = 2 + planned.operand(slot, direction).bytes_per_element()
            seconds += sizes[slot] * moved * (1 if is_fast else 2) / bandwidth  # or decoded again
    return seconds


def _recipe(formats: Mapping[str, tuple[str, str]]) -> tuple[PerLayer, str]:
    """Return the recipe and its expression; the most frequent pair is the default."""
    texts = {
        layer: forward if forward == backward and forward in names() else f"{forward}/{backward}"
        for layer, (forward, backward) in formats.items()
    }
    ((default, _),) = Counter(texts.values()).most_common(1)
    named = {_pattern(layer, formats): text for layer, text in texts.items() if text != default}
    code = f"fq.recipes.per_layer({default!r}" + (f", {named!r})" if named else ")")
    return per_layer(default, named), code


def _pattern(layer: str, layers: Iterable[str]) -> str:
    """Return a pattern that matches only this layer. A name without dots also matches the last
    component of other names."""
    alone = [other for other in layers if matches(layer, other, inside=True)] == [layer]
    return layer if alone else f"[{layer[0]}]{layer[1:]}"
