"""Optimizers: any torch.optim.Optimizer, on plain or DTensor parameters. Its state is predicted before it exists.

A copy of the optimizer takes one step on `meta` copies of its parameters: shapes, dtypes and placements, no memory, no
arithmetic, no communication. An optimizer that reads a value fails there, mostly after it has made its state, which is all
that is wanted. If it made none, or made another than it will, nothing is lost but time: slots of the right size are made
after the first step.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from reft.client.memory.huge_pages import HugePageBuffer
from reft.client.state.extract.dtensor import Region, like, local_piece
from reft.client.state.extract.registry import Removable
from reft.client.state.extract.wrapping import WrappedMethod
from reft.client.state.parameters import NamedParameter, ParameterNames
from reft.client.state.serialization import from_plain, to_plain
from reft.client.state.tensors import TensorIndex, leaf_of
from reft.core.layout.layout import Leaf, plain_strides
from reft.errors import LayoutChanged, UnsupportedState

KERNEL_CHOICES = ("foreach", "fused", "capturable")  # they change how, not what; some refuse `meta`


class PredictedTensor(NamedTuple):
    """A tensor that `state[parameter][key]` will be after the first step; `value` is like it, on `meta`."""

    leaf: Leaf
    parameter: NamedParameter
    key: str
    value: torch.Tensor


class _Stays(NamedTuple):
    """What of an optimizer's small state can't change while its bindings hold."""

    kind: str
    groups: list[list[str]]  # names of their parameters
    shared: list[list[str]]
    has_scalars: bool  # numbers in the state, which do change


class OptimizerExtractor:
    """For every torch.optim.Optimizer."""

    roles = frozenset({"optimizer"})

    def owner(self, value: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """The optimizer that has the state; its groups hold the parameters that this rank updates."""
        return value

    def check(self, prefix: str, value: torch.optim.Optimizer) -> None:
        """Refuses an optimizer around another one (Accelerate's, …), whose own state is empty."""
        for name, each in vars(value).items():
            # One that shares its state with this one keeps nothing of its own.
            if any(
                inner is not value and inner.state is not vars(value).get("state") for inner in _optimizers_in(each)
            ):
                raise UnsupportedState(
                    f"{type(value).__name__} keeps its state in another optimizer, its .{name}.",
                    "pass that one if it holds whole parameters, or register_extractor for this one",
                )

    def parameters(self, prefix: str, value: torch.optim.Optimizer, known: ParameterNames) -> Iterator[NamedParameter]:
        """Those of its groups; the models have named most of them already."""
        for g, group in enumerate(value.param_groups):
            for k, parameter in enumerate(group["params"]):
                name = f"{prefix}.group{g}.param{k}"
                yield NamedParameter(name, parameter, *local_piece(name, parameter))

    def bind(self, found: TensorIndex, prefix: str, value: torch.optim.Optimizer, names: ParameterNames) -> None:
        """Its state, tensors among its groups' values, and parameters that no model has."""
        owner = self.owner(value)
        for each in dict.fromkeys((value, owner)):
            found.track_entry(vars(each), "state", each.state)
            found.track_entry(vars(each), "param_groups", each.param_groups)
            found.track_entries(each.state)
            found.track_entries(each.param_groups)
        foreign = [key for key in owner.state if id(key) not in names]
        if foreign:
            raise UnsupportedState(
                f"{prefix} keeps state under {foreign[0]!r:.60}, which is no parameter; it would be lost."
            )
        for g, group in enumerate(value.param_groups):
            found.track_entries(group["params"])
            for key, each in group.items():
                if isinstance(each, torch.Tensor):
                    found.add(f"{prefix}.group{g}.{key}", group, key, each, staged=True)
            for parameter in group["params"]:
                named = names[id(parameter)]
                if not named.name.startswith(("model.", "state.")):
                    _note(found, "", {named.name: parameter}, named.name, named)
        for group in owner.param_groups:
            found.track_entries(group["params"])
            for parameter in group["params"]:
                if (state := owner.state.get(parameter)) is not None:
                    self._bind_state(found, prefix, names[id(parameter)], state)

    def _bind_state(
        self, found: TensorIndex, prefix: str, parameter: NamedParameter, state: MutableMapping[str, Any]
    ) -> None:
        # A number is another object after each step.
        note = (
            found.track_entries if all(isinstance(each, torch.Tensor) for each in state.values()) else found.track_size
        )
        note(state)
        # State that Adagrad makes of nothing stands still while others' counters go on: it is no replica, nor news.
        if not self._gets_gradient(parameter) and _is_bare(parameter):
            return
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                _check_key(prefix, key)
                _note(found, f"{prefix}.{key}.", state, key, parameter)

    def predict(self, prefix: str, value: torch.optim.Optimizer, names: ParameterNames) -> Iterable[Leaf]:
        """What a step on `meta` makes."""
        return [foreseen.leaf for foreseen in self._foresee(prefix, value, names)]

    def make(
        self,
        prefix: str,
        value: torch.optim.Optimizer,
        leaves: Sequence[Leaf],
        names: ParameterNames,
        room: HugePageBuffer,
    ) -> None:
        """As foreseen; else, for state that comes later than with the first step, as the parameter is."""
        state = self.owner(value).state
        is_plain = all(n.local is n.tensor and n.box is None and not n.runs for n in names.values())
        # What belongs to a whole plain tensor is plain and whole too: its leaf says all that looking ahead would.
        foreseen = {} if is_plain else {each.leaf.name: each for each in self._foresee(prefix, value, names)}
        by_name = {named.name: named for named in names.values()}
        by_run = {run.name: named for named in names.values() for run in named.runs}
        on_device = _with_steps_on_device(self.owner(value))
        for leaf in leaves:
            expected = foreseen.get(leaf.name)
            key, _, name = leaf.name.removeprefix(f"{prefix}.").partition(".")
            if expected is not None and expected.leaf.describe() == leaf.describe():
                parameter, key, model = expected.parameter, expected.key, expected.value
            elif name in by_run:
                parameter = by_run[name]
                model = parameter.local
            elif name in by_name:
                parameter = by_name[name]
                is_piece = parameter.box is not None and leaf.shape == tuple(parameter.local.shape)
                if leaf.shape != leaf.global_shape and not is_piece:
                    continue
                model = parameter.tensor if is_piece else parameter.local
            else:
                continue
            if not parameter.runs or model.shape != parameter.local.shape:
                on_host = key == "step" and not leaf.shape and id(parameter.tensor) not in on_device
                state[parameter.tensor][key] = _placed(leaf, parameter.local, model, room, on_host)
            elif key not in state[parameter.tensor]:  # one for all its runs; padding has to be something
                dtype = getattr(torch, leaf.dtype)
                state[parameter.tensor][key] = torch.zeros_like(parameter.local.detach(), dtype=dtype)

    def _foresee(self, prefix: str, value: torch.optim.Optimizer, names: ParameterNames) -> list[PredictedTensor]:
        twins: dict[
            torch.Tensor, list[NamedParameter]
        ] = {}  # one for all parameters of a kind: they get state of a kind
        owner = self.owner(value)
        groups = []
        for group in owner.param_groups:
            of_kind: dict[tuple[object, ...], torch.Tensor] = {}
            for named in (names[id(parameter)] for parameter in group["params"]):
                if self._gets_gradient(named) and not owner.state.get(named.tensor):
                    kind = _kind(named)
                    twin = of_kind.get(kind)
                    if twin is None:
                        twin = of_kind[kind] = _twin(named)
                        twin.grad = torch.empty_like(twin)
                    twins.setdefault(twin, []).append(named)
            plain = {key: copy.copy(each) for key, each in group.items() if key != "params"}
            choices = {key: False for key in KERNEL_CHOICES if key in group}
            groups.append({**plain, **choices, "params": list(of_kind.values())})
        if not twins:
            return []
        made = _stepped(owner, groups)
        found = [
            foreseen
            for twin, alike in twins.items()
            for named in alike
            for key, each in made.get(twin, {}).items()
            if isinstance(each, torch.Tensor)
            for foreseen in self._foreseen(prefix, key, named, each)
        ]
        order = {id(p): i for i, p in enumerate(p for group in owner.param_groups for p in group["params"])}
        return sorted(found, key=lambda each: order[id(each.parameter.tensor)])

    def _gets_gradient(self, named: NamedParameter) -> bool:
        """FSDP1 gives none to a parameter of which this rank has no element; FSDP2 gives an empty one."""
        return named.tensor.requires_grad and not _is_bare(named)

    def _foreseen(
        self, prefix: str, key: str, parameter: NamedParameter, made: torch.Tensor
    ) -> Iterator[PredictedTensor]:
        _check_key(prefix, key)
        for owner, piece, place in pieces(parameter, made):
            name = f"{prefix}.{key}.{owner}"
            local, own = local_piece(name, piece)
            box = own or place
            yield PredictedTensor(leaf_of(name + (box.tag if box else ""), local, False, box), parameter, key, made)

    def capture(self, prefix: str, value: torch.optim.Optimizer, names: ParameterNames) -> dict[str, Any]:
        """Its groups, and numbers in its state."""
        stays = names.once(("optimizer", id(value)), lambda: self._stays(value, names))
        values = [_plain_values(group, but="params") for group in value.param_groups]
        state = self.owner(value).state
        return {
            **({"shared": stays.shared} if stays.shared else {}),
            "class": stays.kind,
            "groups": [{"params": own, "values": each} for own, each in zip(stays.groups, values, strict=True)],
            "scalars": _scalars(state, names) if stays.has_scalars else {},
        }

    def _stays(self, value: torch.optim.Optimizer, names: ParameterNames) -> _Stays:
        groups = [[names[id(parameter)].name for parameter in group["params"]] for group in value.param_groups]
        state = self.owner(value).state
        entries = [*itertools.chain.from_iterable(values.values() for values in state.values())]
        has_scalars = not all(isinstance(each, torch.Tensor) for each in entries)
        return _Stays(self._class_of(value), groups, _shared(state, names), has_scalars)

    def restore(
        self, prefix: str, value: torch.optim.Optimizer, names: ParameterNames, saved: Mapping[str, Any]
    ) -> None:
        """The reverse of `capture`."""
        if saved["class"] != self._class_of(value):
            raise LayoutChanged(f"the held optimizer is a {saved['class']}, passed was a {self._class_of(value)}.")
        live = [[names[id(p)].name for p in group["params"]] for group in value.param_groups]
        if [group["params"] for group in saved["groups"]] != live:
            raise LayoutChanged(
                f"the optimizer's {len(live)} parameter groups hold other parameters, or in another order,"
                f" than the {len(saved['groups'])} that are held."
            )
        state = self.owner(value).state
        for group, held in zip(value.param_groups, saved["groups"], strict=True):
            group.update(from_plain(held["values"]))
            for parameter in group["params"]:
                name = names[id(parameter)].name
                if name in saved["scalars"]:
                    state[parameter].update(from_plain(saved["scalars"][name]))
        live_of = {names[id(parameter)].name: parameter for parameter in state if id(parameter) in names}
        own = {names[id(p)].name: p for group in self.owner(value).param_groups for p in group["params"]}
        for name, key, first, first_key in saved.get("shared", ()):
            if name in own and first_key in state.get(live_of.get(first), {}):
                state[own[name]][key] = state[live_of[first]][first_key]

    def _class_of(self, value: torch.optim.Optimizer) -> str:
        kinds = [type(each) for each in dict.fromkeys((value, self.owner(value)))]
        return " of ".join(f"{kind.__module__}.{kind.__qualname__}" for kind in kinds)

    def hook(
        self, value: torch.optim.Optimizer, before: Callable[..., None], after: Callable[..., None]
    ) -> list[Removable]:
        """Hooks the object itself, never an optimizer inside it. Where the step is compiled, the hooks break its graph.

        Else torch.compile would go through all that a mark does, compile what it can of it for seconds, and warn of the rest.
        """
        untraced = torch.compiler.disable  # needs torch._dynamo, which making an optimizer has imported
        before, calls = untraced(before), _Calls(untraced(after))

        def begin(optimizer: torch.optim.Optimizer, arguments: Any, named: Any) -> Any:
            calls.begin(optimizer)
            return _before_writing(before, optimizer, arguments, named)

        return [
            value.register_step_pre_hook(untraced(begin)),
            value.register_step_post_hook(untraced(calls.end)),
            WrappedMethod(value, "step", untraced(calls.around, recursive=False)),
        ]


def _check_key(prefix: str, key: object) -> None:
    """Refuses what would not be found again: a leaf's name has the key up to its first dot."""
    if not isinstance(key, str) or "." in key:
        raise UnsupportedState(
            f"{prefix} keeps a tensor of each parameter's state under {key!r}; keys can be text without dots.",
            "name it so in the optimizer's step",
        )


def _optimizers_in(value: object) -> list[torch.optim.Optimizer]:
    """The optimizers that an attribute is, or is a list, tuple or dict of."""
    held = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else (value,)
    return [each for each in held if isinstance(each, torch.optim.Optimizer)]


def _before_writing(before: Callable[..., None], optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
    """A step's pre-hook: calls `before` now, or behind the closure that torch's own optimizers call before they write.

    Lightning trains in there: forward and backward are where the window should be. What other optimizers write before it is
    unknown.

    Returns:
        None, or (args, kwargs) with another closure.
    """
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None or not type(optimizer).__module__.startswith("torch.optim."):
        before()
        return None
    calls = itertools.count()

    def then_before() -> Any:
        loss = closure()
        if next(calls) == 0:
            before()
        return loss

    return ((args[0], then_before, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": then_before})


class _Calls:
    """Calls `after` once for each step of an optimizer that has ended, and not for the parent's step that it calls.

    torch calls the hooks of both steps. A call of the instance's step goes through `around` once, since `super().step()` does
    not; `around` also sees a step that raises, which calls no post-hook.

    A method that was bound before attach goes past `around`: one that was compiled then, or the one that Accelerate puts back
    after each step of a GradScaler. For such a call the hooks count how deep the steps are nested. A step that raises leaves
    that count too high, so it is cut to the most that the class can nest. That is exact for torch's own optimizers, and for
    those that always call their parent's step.
    """

    def __init__(self, after: Callable[..., None]) -> None:
        self._after = after
        self._is_around = False  # a call of the instance's step is under way
        self._has_ended = False  # and a step of a class has ended in it
        self._depth = 0  # of a call that went past `around`

    def around(self, optimizer: torch.optim.Optimizer, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls the step that the instance had."""
        if self._is_around:  # a step that calls `self.step`
            return call(*args, **kwargs)
        self._is_around, self._has_ended = True, False
        try:
            result = call(*args, **kwargs)
        finally:
            self._is_around = False
        if self._has_ended:
            self._after(optimizer)
        return result

    def begin(self, optimizer: torch.optim.Optimizer) -> None:
        """In the pre-hook of a class's step."""
        if not self._is_around:
            self._depth = min(self._depth + 1, _steps_to_nest(type(optimizer)))

    def end(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """The post-hook of a class's step."""
        self._has_ended = True
        if not self._is_around:
            self._depth -= 1
            if self._depth <= 0:
                self._depth = 0
                self._after(optimizer)


def _steps_to_nest(kind: type[torch.optim.Optimizer]) -> int:
    """How many steps of classes a call can run inside each other: those that the class has or inherits."""
    steps = (vars(each)["step"] for each in kind.__mro__ if "step" in vars(each) and each is not torch.optim.Optimizer)
    return len({inspect.unwrap(step) for step in steps})


def pieces(parameter: NamedParameter, value: torch.Tensor) -> Iterator[tuple[str, torch.Tensor, Region | None]]:
    """What a parameter, or a tensor of its state, is as leaves: itself, or one for each run of a flat parameter.

    Yields:
        what it is (a piece) of, its memory, where it lies in the whole.
    """
    if not parameter.runs or value.shape != parameter.local.shape:
        yield parameter.name, value, state_region(parameter, value)
        return
    for run in parameter.runs:
        yield run.name, value.detach()[run.at : run.at + run.size], run.box


def _note(found: TensorIndex, before: str, place: Mapping[Any, Any], key: object, parameter: NamedParameter) -> None:
    """Notes `place[key]`, a parameter or a tensor of its state; `before` goes before its name."""
    value = place[key]
    for name, piece, box in pieces(parameter, value):
        if piece is value:
            found.add(before + name, place, key, value, box=box)
        else:
            found.add(before + name, {name: piece}, name, piece, box=box)
    if parameter.runs:
        found.track_entry(place, key, value)
        found.track_address(value)


def state_region(parameter: NamedParameter, value: torch.Tensor) -> Region | None:
    """Where a plain tensor of a parameter's state lies.

    Scalars and the state of whole parameters are whole. State of the shape of a sharded parameter's piece lies as the piece
    does; state of any other shape belongs to that piece, and its name says to which.
    """
    if parameter.box is None or isinstance(value, DTensor) or not value.dim():
        return None
    local = tuple(parameter.local.shape)
    if tuple(value.shape) == local:
        return parameter.box
    if local == parameter.box.shape:
        return None
    shape = tuple(value.shape)
    cut = ",".join(f"{first}:{first + size}" for first, size in zip(parameter.box.offset, local, strict=True))
    return Region(shape, (0,) * len(shape), parameter.box.tag or f"[of {cut}]")


def _is_bare(named: NamedParameter) -> bool:
    """Whether it is a plain piece without elements."""
    return named.box is not None and not isinstance(named.tensor, DTensor) and not named.local.numel()


def _kind(named: NamedParameter) -> tuple[object, ...]:
    """What decides of which kind a parameter's state will be; its place in the whole does not."""
    tensor, local = named.tensor, named.local
    placed = (tensor.device_mesh, tensor.placements, tensor.shape) if isinstance(tensor, DTensor) else ()
    return local.shape, local.stride(), local.dtype, placed


def _twin(named: NamedParameter) -> torch.Tensor:
    """The parameter on `meta`."""
    local = named.local
    with torch.no_grad():
        meta = torch.empty_strided(local.shape, local.stride(), dtype=local.dtype, device="meta")
        return like(named.tensor, meta).requires_grad_()


def _stepped(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> Mapping[torch.Tensor, dict[str, Any]]:
    """The state of a copy of the optimizer after one step on these groups."""
    double = object.__new__(type(optimizer))
    vars(double).update(
        {key: copy.copy(value) if isinstance(value, (dict, list)) else value for key, value in vars(optimizer).items()}
    )
    vars(double).pop("step", None)  # a scheduler's wrapper would count this as a step
    for key in [key for key in vars(double) if key.endswith("_hooks")]:
        vars(double)[key] = OrderedDict()
    double.state, double.param_groups = defaultdict(dict), groups
    generator = torch.get_rng_state()
    # Whatever a foreign optimizer raises here, its first real step will tell.
    with torch.no_grad(), contextlib.suppress(Exception):
        inspect.unwrap(type(optimizer).step)(double)
    torch.set_rng_state(generator)
    return double.state


def _with_steps_on_device(optimizer: torch.optim.Optimizer) -> set[int]:
    """Ids of the parameters whose `step` lies beside them: kernels of these groups read it there, and not from the host.

    As in Optimizer._process_value_according_to_param_policy of torch. All other state lies beside its parameter.
    """
    groups = (each for each in optimizer.param_groups if each.get("fused") or each.get("capturable"))
    return {id(parameter) for group in groups for parameter in group["params"]}


def _placed(
    leaf: Leaf, parameter: torch.Tensor, model: torch.Tensor, room: HugePageBuffer, on_host: bool
) -> torch.Tensor:
    """Room for one leaf of optimizer state.

    Args:
        parameter: its local tensor, whose device the state shares.
        model: a tensor that is placed as the new one: a DTensor for one that is sharded.
        on_host: whether it lies on the host wherever the parameter does.
    """
    dtype, stride = getattr(torch, leaf.dtype), parameter.stride()
    is_alike = stride != leaf.stride and tuple(parameter.shape) == leaf.shape
    if is_alike and plain_strides(leaf.shape, stride) == leaf.stride:
        # As the optimizer would make it: fused kernels compare strides, those of dimensions of size 1 too.
        leaf = replace(leaf, stride=stride)
    if on_host or parameter.device.type == "cpu":
        local = room.empty(leaf, dtype)
    else:
        local = torch.empty_strided(leaf.shape, leaf.stride, dtype=dtype, device=parameter.device)
    return like(model, local)


def _shared(state: Mapping[torch.Tensor, Mapping[str, Any]], names: ParameterNames) -> list[list[str]]:
    """Which tensors of the state are there again: (parameter, key, first parameter that has it, key there).

    They are leaves under their first name only, as the code tables are that bitsandbytes gives to all parameters.
    """
    first: dict[int, list[str]] = {}
    found = []
    for parameter, values in state.items():
        for key, each in values.items():
            if isinstance(each, torch.Tensor) and id(parameter) in names:
                place = [names[id(parameter)].name, key]
                before = first.setdefault(id(each), place)
                if before is not place:
                    found.append([*place, *before])
    return found


def _scalars(state: Mapping[torch.Tensor, Mapping[str, Any]], names: ParameterNames) -> dict[str, dict[str, Any]]:
    """Numbers in the state, by parameter."""
    plain = ((key, _plain_values(values)) for key, values in state.items())
    return {names[id(key)].name: values for key, values in plain if values and id(key) in names}


def _plain_values(values: Mapping[str, Any], but: str = "") -> dict[str, Any]:
    """What is no tensor, and so no leaf."""
    return {key: to_plain(v) for key, v in values.items() if not isinstance(v, torch.Tensor) and key != but}
