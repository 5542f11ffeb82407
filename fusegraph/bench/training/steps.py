"""What the suite of training measures: forward, loss and backward of models, with an optimiser or without, and parts.

On a GPU these are models of the zoo and GPT-2's parts at their sizes, else small ones, for an engine that emulates it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from fusegraph.bench.sizes.cases import Case, cases
from fusegraph.bench.sizes.run import inputs_of
from fusegraph.bench.torch_engines import ENGINES, OURS, on_engine
from fusegraph.bench.zoo.models import AUTOCAST, MODELS, TORCHVISION, TRANSFORMERS, called, element
from fusegraph.bench.zoo.run import Make, Subject, Task, results

#: "train": with dropout and statistics of the batch; "eval": without, but with gradients.
TRAIN, EVAL = MODES = ("train", "eval")
#: How names of whole steps begin, and those end of which ours is written with the builder.
WHOLE, _GRAPH = "step", "-graph"
#: GPT-2's loss head: tokens of a sequence, elements of a token, words; and a small one.
_HEAD, _SMALL_HEAD = (1024, 768, 50257), (16, 64, 1000)
#: What AdamW is given in all forms.
_ADAMW: Mapping[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
#: Losses of one function that are further apart, relative to them, depend on random numbers.
_SAME = 1e-10


class Gradients(Subject):
    """A loss and its gradients.  Subclasses say of what."""

    gradients = True

    def __init__(self, task: Task) -> None:
        self.task = task
        self.function, self.inputs, self.parameters = self.made()

    def made(self, *, exact: bool = False) -> tuple[Callable[..., Any], list[Any], list[Any]]:
        """Returns a function of inputs that gives the loss, the inputs, and what it is differentiated by.

        All are the same each time, but in float64 if it is to be ``exact``.
        """
        raise NotImplementedError

    def step(self, engine: str) -> Callable[[], list[Any]]:
        function = on_engine(engine, self.function)
        return lambda: _gradients(function(*self.inputs), self.parameters)

    def expected(self) -> tuple[str, list[Any]] | None:
        import torch

        function, inputs, parameters = self.made(exact=True)
        losses = []
        for seed in (0, 1):
            torch.manual_seed(seed)
            losses.append(function(*inputs))
        if abs(losses[0] / losses[1] - 1) > _SAME:
            return None
        return "float64", results(lambda: _gradients(losses[0], parameters), 1)


def _gradients(loss: Any, parameters: Sequence[Any]) -> list[Any]:
    """Returns a loss and its gradients by the parameters on which it depends."""
    import torch

    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return [loss.detach(), *(gradient for gradient in found if gradient is not None)]


# ---- models


class ModelStep(Gradients):
    """A model with the loss that its task usually has, or a mean square."""

    def __init__(self, task: Task) -> None:
        #: What is loaded, and what its configuration says instead.
        self.model, self.changes = task.model, dict[str, Any]()
        super().__init__(task)

    def made(self, *, exact: bool = False) -> tuple[Callable[..., Any], list[Any], list[Any]]:
        task = self.task
        module, names, inputs = self.loaded()
        if exact:
            module, inputs = module.double(), [x.double() if x.is_floating_point() else x for x in inputs]
        module.requires_grad_(True).train(task.mode == TRAIN)
        function, inputs = with_loss(self.model, module, names, inputs)
        return _autocast(function, task) if not exact else function, inputs, list(module.parameters())

    def loaded(self) -> tuple[Any, list[str], list[Any]]:
        """Returns the module, and its inputs with their names, as `Model.loaded` does."""
        task, model = self.task, MODELS[self.model]
        if task.device == "cuda":
            return model.loaded(task.dtype, task.device, task.batch, **self.changes)
        case = _small(self.model)
        sizes = {name: low + (high - low) // 8 for name, (low, high) in case.bounds.items()}
        module, _, _ = model.loaded(task.dtype, task.device, 1, **{**self.changes, **case.changes})
        return module, list(case.operands), inputs_of(case, {**sizes, "batch": task.batch}, "cpu", 0, vary=False)


def _small(model: str) -> Case:
    (found,) = cases(lambda name: name == model, small=True)
    return found


def with_loss(
    name: str, module: Any, names: Sequence[str], inputs: Sequence[Any]
) -> tuple[Callable[..., Any], list[Any]]:
    """Returns the function of a model's inputs and targets that gives its loss, and these.

    A model that takes labels has those tokens as labels that follow, one of torchvision random classes, and others have
    random targets of all elements, whose squared distances are averaged.
    """
    import torch
    from torch.nn import functional

    if "labels" in inspect.signature(module.forward).parameters:
        # Else transformers logs in the middle of the graph what it takes instead, which cuts it in two.
        module.loss_type = getattr(module, "loss_type", None) or "ForCausalLM"
        return called(module, [*names, "labels"]), [*inputs, inputs[0]]
    call = called(module, names)
    with torch.no_grad():
        result = call(*inputs)
    generator = torch.Generator(result.device).manual_seed(1)
    if name.startswith(f"{TORCHVISION}:"):
        target = torch.randint(0, result.shape[1], result.shape[:1], device=result.device, generator=generator)
        measure: Callable[..., Any] = functional.cross_entropy
    else:
        target = torch.randn(result.shape, device=result.device, generator=generator)
        measure = functional.mse_loss

    def loss(*given: Any) -> Any:
        y = call(*given[:-1])
        return measure(y if y.dtype == torch.float64 else y.float(), given[-1])

    return loss, [*inputs, target]


def _autocast(function: Callable[..., Any], task: Task) -> Callable[..., Any]:
    if task.dtype != AUTOCAST:
        return function
    import torch

    def cast(*given: Any) -> Any:
        with torch.autocast(task.device, torch.bfloat16):
            return function(*given)

    return cast


# ---- a loss head


class Head(Gradients):
    """A linear layer with the cross entropy of its logits: the loss, and the gradients of rows and weights."""

    def made(self, *, exact: bool = False) -> tuple[Callable[..., Any], list[Any], list[Any]]:
        import torch
        from torch.nn import functional

        task = self.task
        length, width, words = _HEAD if task.device == "cuda" else _SMALL_HEAD
        torch.manual_seed(0)
        with torch.device(task.device):
            x, w = torch.randn(task.batch * length, width), torch.randn(words, width) * 0.02
            target = torch.randint(0, words, x.shape[:1])
        x, w = ((t.to(element(task.dtype)).double() if exact else t.to(element(task.dtype))) for t in (x, w))
        parameters = [t.requires_grad_(True) for t in (x, w)]

        def loss(x: Any, w: Any, target: Any) -> Any:
            logits = functional.linear(x, w)
            return functional.cross_entropy(logits if exact else logits.float(), target)

        return loss if exact else _autocast(loss, task), [*parameters, target], parameters


class HeadGraph(Head):
    """The same with `Graph.linear_cross_entropy`, without torch."""

    def step(self, engine: str) -> Callable[[], list[Any]]:
        if engine != OURS:
            return super().step(engine)
        from fusegraph.graph import Graph

        arrays = [t.detach() for t in self.inputs]
        g = Graph("head")
        x, w, target = (g.tensor(name, a.shape, _name(a)) for name, a in zip(("x", "w", "target"), arrays))
        loss, _ = g.linear_cross_entropy(x, w, target)
        for each in (loss, *g.gradients(loss, [x, w])):
            g.output(each)
        executable = g.compile(self.task.device)
        return lambda: list(executable(*arrays))


def _name(tensor: Any) -> str:
    """Returns the name of a torch tensor's dtype."""
    return str(tensor.dtype).removeprefix("torch.")


# ---- optimisers


class Optimizer(Subject):
    """AdamW of GPT-2's parameters: eager torch's is its fused one, the others compile its form of lists of tensors.

    With ``clip`` gradients are scaled to a global norm of 1 before.
    """

    calls = 2

    def __init__(self, task: Task, *, clip: bool = False) -> None:
        self.task, self.clip = task, clip
        layers, (_, width, words) = (12, _HEAD) if task.device == "cuda" else (2, _SMALL_HEAD)
        ends = [(words, width), (1024, width), (width,), (width,)]
        maps = [shape for n, m in ((1, 3), (1, 1), (1, 4), (4, 1)) for shape in ((n * width, m * width), (m * width,))]
        self.shapes = [*ends, *layers * [*maps, *4 * [(width,)]]]

    def drawn(self, seed: int) -> list[Any]:
        """Returns values for all parameters."""
        import torch

        device = self.task.device
        generator = torch.Generator(device).manual_seed(seed)
        drawn = (torch.randn(shape, device=device, generator=generator) * 0.02 for shape in self.shapes)
        return [x.to(element(self.task.dtype)) for x in drawn]

    def step(self, engine: str) -> Callable[[], list[Any]]:
        weights = self.drawn(0)
        update = on_engine(engine, adamw(weights, self.task, fused=engine == "eager", clip=self.clip))
        for weight, gradient in zip(weights, self.drawn(1)):
            weight.grad = gradient

        def step() -> list[Any]:
            update()
            return weights

        return step


def adamw(parameters: Sequence[Any], task: Task, *, fused: bool, clip: bool = False) -> Callable[[], Any]:
    """Returns the function that updates parameters by their gradients."""
    import torch

    form = {"fused" if fused else "foreach": True, "capturable": task.device == "cuda"}
    made = torch.optim.AdamW(parameters, **_ADAMW, **form)

    def update() -> None:
        if clip:
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        made.step()

    return update


class OptimizerGraph(Optimizer):
    """The same with `fusegraph.optimizers`, without torch.

    Parameters of 16 bits have master weights; torch's optimiser knows none, so that there is nothing beside these.
    """

    def __init__(self, task: Task, *, clip: bool = False) -> None:
        super().__init__(task, clip=clip)
        self.masters = element(task.dtype).itemsize == 2
        if self.masters:
            self.engines = (OURS,)

    def expected(self) -> tuple[str, list[Any]] | None:
        return None if self.masters else super().expected()

    def step(self, engine: str) -> Callable[[], list[Any]]:
        if engine != OURS:
            return super().step(engine)
        import torch

        from fusegraph import optimizers
        from fusegraph.graph import Graph

        weights, gradients = self.drawn(0), self.drawn(1)
        g = Graph("adamw")
        held = [g.tensor(f"w{n}", tuple(t.shape), _name(t)) for n, t in enumerate(weights)]
        by: Sequence[Any] = [g.tensor(f"g{n}", tuple(t.shape), _name(t)) for n, t in enumerate(gradients)]
        arrays = {t.name: array for t, array in zip((*held, *by), (*weights, *gradients))}
        if self.clip:
            by, norm = optimizers.clip_by_global_norm(g, by, 1.0)
            g.output(norm)
        state = optimizers.adamw(g, held, by, masters=self.masters, **_ADAMW)
        for name, tensor in state.tensors.items():
            kind, of = getattr(torch, tensor.dtype.name), state.masters.get(name)
            new = torch.zeros(tensor.shape, dtype=kind, device=self.task.device)
            arrays[name] = new if of is None else arrays[of].to(kind)
        executable = g.compile(self.task.device)

        def step() -> list[Any]:
            executable(**arrays)
            return weights

        return step


# ---- whole steps


class WholeStep(ModelStep):
    """GPT-2 without dropout, and AdamW: torch's fused one beside another compiler, its compiled form beside ours."""

    calls = 4

    def __init__(self, task: Task, sizes: Mapping[str, int] | None = None) -> None:
        self.task, self.model = task, f"{TRANSFORMERS}:gpt2"
        self.changes = {**dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0), **(sizes or {})}

    def step(self, engine: str) -> Callable[[], list[Any]]:
        import torch

        function, inputs, parameters = self.made()
        loss_of = on_engine(engine, function)
        update = adamw(parameters, self.task, fused=engine != OURS)
        if engine == OURS:
            update = torch.compile(update, dynamic=False, **(ENGINES[OURS] or {}))

        def step() -> list[Any]:
            loss = loss_of(*inputs)
            for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters)):
                parameter.grad = gradient
            del gradient
            update()
            for parameter in parameters:
                parameter.grad = None
            return [loss.detach()]

        return step

    def expected(self) -> tuple[str, list[Any]]:
        return "eager", results(self.step("eager"), self.calls)


# ---- what was asked for


#: What is no model of the zoo: what is measured, the batch, and whether nothing else has room beside it.
PARTS: Mapping[str, tuple[Make, int, bool]] = {
    f"{WHOLE}:gpt2": (WholeStep, 16, True),
    f"{WHOLE}:gpt2-1.5b": (partial(WholeStep, sizes={"n_embd": 1600, "n_layer": 48, "n_head": 25}), 8, True),
    "head:gpt2": (Head, 8, False),
    f"head:gpt2{_GRAPH}": (HeadGraph, 8, False),
    "adamw:gpt2": (Optimizer, 1, False),
    f"adamw:gpt2{_GRAPH}": (OptimizerGraph, 1, False),
    "adamw-clipped:gpt2": (partial(Optimizer, clip=True), 1, False),
    f"adamw-clipped:gpt2{_GRAPH}": (partial(OptimizerGraph, clip=True), 1, False),
}


def subject(task: Task) -> Subject:
    """Returns what a task measures."""
    return PARTS[task.model][0](task) if task.model in PARTS else ModelStep(task)


def tasks(
    wanted: Callable[[str], Any], dtypes: Sequence[str], batches: Sequence[int], modes: Sequence[str], device: str
) -> list[Task]:
    """Returns the tasks of parts and models whose names are wanted, parts in the mode of training alone.

    What is written with the builder has no autocast and no tf32.  A batch of 0 is the usual one.  On the device "cpu"
    there are small models, and one batch.
    """
    small = {case.name: case.bounds.get("batch", (1,))[0] for case in cases(MODELS.__contains__, small=True)}
    usual = {name: batch for name, (_, batch, _) in PARTS.items()} | {name: of.batch for name, of in MODELS.items()}
    if device == "cpu":
        usual, batches = {**dict.fromkeys(PARTS, 2), **small}, [0]
    return [
        Task(name, dtype, batch or usual[name], mode, device, single=name in PARTS and PARTS[name][2])
        for dtype in dtypes
        for mode in modes
        for name in usual
        if wanted(name) and (name not in PARTS or mode == TRAIN)
        if not name.endswith(_GRAPH) or dtype in ("bf16", "fp32")
        for batch in dict.fromkeys(batch or usual[name] for batch in batches)
    ]
