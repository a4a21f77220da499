"""Optimizers: any torch.optim.Optimizer, on plain, DTensor or other parameters.

    state[parameter][key]    a tensor, a tensor subclass, or lists and dicts of tensors ─► leaves
                             numbers, text, and the containers without their tensors   ─► capsule

State that does not exist yet is made again by the forms of the saved leaves (`state_forms`). What
the first step of torch's own optimizers will create is foreseen (`foreseen`). The state of any
other optimizer joins at a review of the placement, after its first step.
"""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from reft.client.memory.huge_pages import HugePageBuffer
from reft.client.state.containers import check_value, entries, has_tensors, with_tensors, without_tensors
from reft.client.state.extract.dtensor import Region, like, local_piece
from reft.client.state.extract.foreseen import foreseen_state
from reft.client.state.extract.registry import Removable
from reft.client.state.extract.state_forms import (
    DTensorWrapper,
    StateForm,
    SubclassWrapper,
    Wrapper,
    assemble,
    wrappers_of,
)
from reft.client.state.extract.wrapping import WrappedMethod
from reft.client.state.inner_tensors import (
    PLAIN_TYPES,
    InnerTensor,
    has_inner_tensors,
    inner_region,
    inner_tensors,
    piece_region,
)
from reft.client.state.parameters import NamedParameter, ParameterNames
from reft.client.state.serialization import from_plain, to_plain
from reft.client.state.tensors import TensorIndex, device_of, identity_of, is_dense, leaf_of
from reft.core.layout.layout import Leaf, plain_strides
from reft.errors import LayoutChanged, UnsupportedState
from reft.wire import capsule_format

# A tensor in a group, behind the optimizer's prefix; a parameter that no model has is none.
ITSELF = ""  # in the place of a key: the memory of the parameter, not of its state
GROUP_TENSOR = re.compile(r"group(\d+)\.(?!param\d+)([^/]+)", re.DOTALL)


class _FixedState(NamedTuple):
    """Small state of an optimizer that cannot change while the tensor index is current."""

    kind: str
    groups: list[list[str]]  # for each group, the names of its parameters
    shared: list[list[str]]
    group_tensors: list[list[Any]]  # see `_group_tensors`
    has_scalars: bool  # whether the state has numbers; their values do change


class OptimizerExtractor:
    """Extracts the state of any torch.optim.Optimizer."""

    roles = frozenset({"optimizer"})

    def owner(self, value: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Returns the optimizer that has the state.

        Its groups hold the parameters that this rank updates.
        """
        return value

    def check(self, prefix: str, value: torch.optim.Optimizer) -> None:
        """Refuses an optimizer around another one, whose own state is empty (Accelerate's, …).

        Also refuses values of its groups that a capsule can't hold.
        """
        for name, each in vars(value).items():
            # An inner optimizer that shares this one's state is fine.
            if any(
                inner is not value and inner.state is not vars(value).get("state") for inner in _optimizers_in(each)
            ):
                raise UnsupportedState(
                    f"{type(value).__name__} keeps its state in another optimizer, its .{name}.",
                    "pass that one if it holds whole parameters, or register_extractor for this one",
                )
        for g, group in enumerate(value.param_groups):
            try:
                capsule_format.encode(_plain_values(group, without="params"))
            except UnsupportedState as error:
                raise UnsupportedState(
                    f"{prefix}, parameter group {g}: {error.message}",
                    "keep such a value in an attribute of the optimizer, which the script sets again after a restart",
                ) from error

    def parameters(self, prefix: str, value: torch.optim.Optimizer, known: ParameterNames) -> Iterator[NamedParameter]:
        """Yields the parameters of the groups; models have named most of them already."""
        for g, group in enumerate(value.param_groups):
            for k, parameter in enumerate(group["params"]):
                name = f"{prefix}.group{g}.param{k}"
                yield NamedParameter(name, parameter, *local_piece(name, parameter))

    def bind(self, index: TensorIndex, prefix: str, value: torch.optim.Optimizer, names: ParameterNames) -> None:
        """Adds the optimizer's state, tensors in its groups, and parameters that no model has."""
        owner = self.owner(value)
        for each in dict.fromkeys((value, owner)):
            index.track_entry(vars(each), "state", each.state)
            index.track_entry(vars(each), "param_groups", each.param_groups)
            index.track_entries(each.state)
            index.track_entries(each.param_groups)
        on_device = _with_steps_on_device(owner)
        foreign = [key for key in owner.state if id(key) not in names]
        if foreign:
            raise UnsupportedState(
                f"{prefix} keeps state under {foreign[0]!r:.60}, which is not a parameter; that state would be lost."
            )
        for g, group in enumerate(value.param_groups):
            track_group(index, group)
            for key, each in group.items():
                if isinstance(each, torch.Tensor):
                    added = index.add(f"{prefix}.group{g}.{key}", group, key, each, staged=True)
                    if each.device.type != "cpu":
                        index.forms.update({leaf: StateForm(on_host=False).text() for leaf, _ in added if leaf})
            for parameter in group["params"]:
                named = names[id(parameter)]
                if not named.name.startswith(("model.", "state.")):
                    _add_pieces(index, "", {named.name: parameter}, named.name, named)
        known: list[tuple[str, str]] = []  # parameter and key of tensors whose memory has a leaf already
        for group in owner.param_groups:
            if owner is not value:
                track_group(index, group)
            for parameter in group["params"]:
                if (state := owner.state.get(parameter)) is not None:
                    known += self._bind_state(index, prefix, names[id(parameter)], state, on_device)
        _check_shared(prefix, known, owner, names)

    def _bind_state(
        self,
        index: TensorIndex,
        prefix: str,
        parameter: NamedParameter,
        state: MutableMapping[str, Any],
        on_device: set[int],
    ) -> Iterator[tuple[str, str]]:
        """Adds a parameter's state; yields name and key of tensors of known memory."""
        _track(index, state)
        # Adagrad creates state for an empty piece. Its counter stands still, so it is no replica
        # of other ranks' state. It never changes, so it is not saved.
        if not self._gets_gradient(parameter) and _is_empty_piece(parameter):
            return
        for key, value in state.items():
            check_value(f"{prefix}: state[{parameter.name}][{key!r}]", value)
            if not has_tensors(value):
                continue
            _check_key(prefix, key)
            for place, place_key, keys in _tensors_in(index, state, key):
                name_prefix, tensor = f"{prefix}.{key}.", place[place_key]
                if parameter.runs and tensor.shape == parameter.local.shape:
                    _check_flat(name_prefix, parameter, keys, tensor)
                    _add_pieces(index, name_prefix, place, place_key, parameter)
                elif not _add_state(index, name_prefix, place, place_key, keys, parameter, key, on_device):
                    yield parameter.name, key

    def predict(self, prefix: str, value: torch.optim.Optimizer, names: ParameterNames) -> Iterable[Leaf]:
        """Returns the leaves that the first step of one of torch's own optimizers creates."""
        owner = self.owner(value)
        groups = [
            [named for named in (names[id(parameter)] for parameter in group["params"]) if self._gets_gradient(named)]
            for group in owner.param_groups
        ]
        return [
            leaf
            for parameter, values in foreseen_state(owner, groups)
            for key, each in values.items()
            if has_tensors(each)
            for leaf in _foreseen_leaves(prefix, key, parameter, each)
        ]

    def make(
        self,
        prefix: str,
        value: torch.optim.Optimizer,
        leaves: Sequence[Leaf],
        names: ParameterNames,
        buffer: HugePageBuffer,
    ) -> None:
        """Creates state by the forms of its leaves, and tensors of groups.

        A list or a dict comes as a dict; `restore` makes the container from the capsule.
        """
        state = self.owner(value).state
        by_name = {named.name: named for named in names.values()}
        groups = (value if isinstance(value, torch.optim.Optimizer) else self.owner(value)).param_groups
        leaves = [each for each in leaves if each.name in by_name or not _make_in_group(prefix, groups, each, names)]
        by_run = {run.name: named for named in names.values() for run in named.runs}
        on_device = _with_steps_on_device(self.owner(value))
        parts: dict[tuple[int, str], list[tuple[tuple[Wrapper, ...], torch.Tensor]]] = {}
        owners: dict[int, NamedParameter] = {}
        for leaf in leaves:
            form = StateForm.of(leaf)
            key, _, name = form.name(leaf).removeprefix(f"{prefix}.").partition(".")
            if name in by_run:
                flat = by_run[name]
                if (id(flat.tensor), key) not in parts:  # one tensor for all slices; zeros for the padding
                    whole = torch.zeros_like(flat.local.detach(), dtype=getattr(torch, leaf.dtype))
                    parts[id(flat.tensor), key] = [((), whole)]
                    owners[id(flat.tensor)] = flat
                continue
            parameter = by_name.get(name)
            is_piece = (
                parameter is not None and parameter.box is not None and leaf.shape == tuple(parameter.local.shape)
            )
            is_placed = any(isinstance(each, (DTensorWrapper, SubclassWrapper)) for each in form.wrappers)
            if parameter is None or (leaf.shape != leaf.global_shape and not is_piece and not is_placed):
                continue
            on_host = _is_on_host(key, leaf.shape, parameter, on_device) if form.on_host is None else form.on_host
            tensor = _allocate(leaf, parameter.local, buffer, on_host)
            if is_piece and not is_placed:
                tensor = like(parameter.tensor, tensor)
            parts.setdefault((id(parameter.tensor), key), []).append((form.wrappers, tensor))
            owners[id(parameter.tensor)] = parameter
        order = [id(parameter) for group in self.owner(value).param_groups for parameter in group["params"]]
        place = {number: at for at, number in enumerate(order)}
        # The leaves of state that nobody foresaw come in the order of their names.
        for (number, key), tensors in sorted(parts.items(), key=lambda each: place.get(each[0][0], len(order))):
            state[owners[number].tensor][key] = assemble(tensors, owners[number])

    def _gets_gradient(self, named: NamedParameter) -> bool:
        """Returns whether the parameter gets a gradient.

        FSDP1 gives none to a parameter without elements on this rank; FSDP2 gives an empty one.
        """
        return named.tensor.requires_grad and not _is_empty_piece(named)

    def capture(self, prefix: str, value: torch.optim.Optimizer, names: ParameterNames) -> dict[str, Any]:
        """Returns the optimizer's groups, and numbers in its state."""
        fixed = names.once(("optimizer", id(value)), lambda: self._fixed_state(value, names))
        values = [_plain_values(group, without="params") for group in value.param_groups]
        state = self.owner(value).state
        return {
            **({"shared": fixed.shared} if fixed.shared else {}),
            **({"group_tensors": fixed.group_tensors} if fixed.group_tensors else {}),
            "class": fixed.kind,
            "groups": [
                {"params": names_of_group, "values": each}
                for names_of_group, each in zip(fixed.groups, values, strict=True)
            ],
            "scalars": _scalars(state, names) if fixed.has_scalars else {},
        }

    def _fixed_state(self, value: torch.optim.Optimizer, names: ParameterNames) -> _FixedState:
        groups = [[names[id(parameter)].name for parameter in group["params"]] for group in value.param_groups]
        state = self.owner(value).state
        entries = [*itertools.chain.from_iterable(values.values() for values in state.values())]
        has_scalars = not all(isinstance(each, torch.Tensor) for each in entries)
        shared = _shared_tensors(self.owner(value), names)
        group_tensors = _group_tensors(value.param_groups)
        return _FixedState(self._class_of(value), groups, shared, group_tensors, has_scalars)

    def restore(
        self, prefix: str, value: torch.optim.Optimizer, names: ParameterNames, saved: Mapping[str, Any]
    ) -> None:
        """Reverses `capture`."""
        if saved["class"] != self._class_of(value):
            raise LayoutChanged(
                f"the snapshot's optimizer is a {saved['class']}, this job's is a {self._class_of(value)}."
            )
        live_groups = [[names[id(p)].name for p in group["params"]] for group in value.param_groups]
        if [group["params"] for group in saved["groups"]] != live_groups:
            raise LayoutChanged(
                f"the optimizer's {len(live_groups)} parameter groups have other parameters, or another order,"
                f" than the {len(saved['groups'])} groups of the snapshot."
            )
        _share_group_tensors(value.param_groups, saved.get("group_tensors", ()))
        state = self.owner(value).state
        for group, saved_group in zip(value.param_groups, saved["groups"], strict=True):
            _forget_keys(value, group, saved_group["values"])
            group.update(from_plain(saved_group["values"]))
            for parameter in group["params"]:
                name = names[id(parameter)].name
                for key, each in saved["scalars"].get(name, {}).items():
                    state[parameter][key] = from_plain(with_tensors(each, state[parameter].get(key)))
        _share_tensors(self.owner(value), names, saved.get("shared", ()))

    def _class_of(self, value: torch.optim.Optimizer) -> str:
        kinds = [type(each) for each in dict.fromkeys((value, self.owner(value)))]
        return " of ".join(f"{kind.__module__}.{kind.__qualname__}" for kind in kinds)

    def hook(
        self, value: torch.optim.Optimizer, before: Callable[..., None], after: Callable[..., None]
    ) -> list[Removable]:
        """Hooks the object itself, never an optimizer inside; a compiled step's graph breaks there.

        Otherwise torch.compile would trace through a whole mark, compile for seconds, and warn
        about the rest.
        """
        untraced = torch.compiler.disable  # needs torch._dynamo, which creating an optimizer imports
        before, calls = untraced(before), _Calls(untraced(after))

        def begin(optimizer: torch.optim.Optimizer, arguments: Any, keywords: Any) -> Any:
            calls.begin(optimizer)
            is_torchs = all(_is_torchs(each) for each in (optimizer, self.owner(optimizer)))
            return _before_writing(before, is_torchs, arguments, keywords)

        return [
            value.register_step_pre_hook(untraced(begin)),
            value.register_step_post_hook(untraced(calls.end)),
            WrappedMethod(value, "step", untraced(calls.around, recursive=False)),
        ]


def _check_key(prefix: str, key: object) -> None:
    """Refuses keys with dots: in a leaf's name, the key ends at the first dot."""
    if not isinstance(key, str) or "." in key:
        raise UnsupportedState(
            f"{prefix} keeps a tensor of each parameter's state under {key!r}; keys must be text without dots.",
            "rename the key in the optimizer's step",
        )


def _optimizers_in(value: object) -> list[torch.optim.Optimizer]:
    """Returns the optimizers that an attribute is, or that its list, tuple or dict contains."""
    values = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else (value,)
    return [each for each in values if isinstance(each, torch.optim.Optimizer)]


def _is_torchs(optimizer: torch.optim.Optimizer) -> bool:
    """Whether torch has the class: then nothing is written before the closure has run."""
    return type(optimizer).__module__.startswith(("torch.optim.", "torch.distributed.optim.zero_"))


def _before_writing(before: Callable[..., None], is_torchs: bool, args: Any, kwargs: Any) -> Any:
    """Calls `before` at once, or after the closure that torch's own optimizers call before writing.

    Runs as a step's pre-hook. Lightning trains in the closure: forward and backward belong into the
    window. Whether other optimizers write before the closure is unknown.

    Returns:
        None, or (args, kwargs) with another closure.
    """
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None or not is_torchs:
        before()
        return None
    calls = itertools.count()

    def closure_then_before() -> Any:
        loss = closure()
        if next(calls) == 0:
            before()
        return loss

    return (
        ((args[0], closure_then_before, *args[2:]), kwargs)
        if len(args) > 1
        else (args, {**kwargs, "closure": closure_then_before})
    )


class _Calls:
    """Calls `after` once for each finished step, not for the parent's step inside it.

    torch calls the hooks of both steps. A call of the instance's step goes through `around` once,
    since `super().step()` does not. `around` also sees a step that raises, which calls no
    post-hook.

    A method that was bound before attach bypasses `around`. Examples: a method compiled before
    attach, or the method that Accelerate puts back after each step of a GradScaler. For such a call
    the hooks count how deep the steps are nested. A step that raises leaves that count too high, so
    it is limited to the most that the class can nest. That is exact for torch's own optimizers, and
    for optimizers that always call their parent's step.
    """

    def __init__(self, after: Callable[..., None]) -> None:
        self._after = after
        self._is_around = False  # a call of the instance's step is under way
        self._has_ended = False  # a step of a class has ended in that call
        self._depth = 0  # nesting of steps in a call that bypassed `around`

    def around(self, optimizer: torch.optim.Optimizer, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls the step that the instance had before it was wrapped."""
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
        """Runs in the pre-hook of a class's step."""
        if not self._is_around:
            self._depth = min(self._depth + 1, _steps_to_nest(type(optimizer)))

    def end(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Runs in the post-hook of a class's step."""
        self._has_ended = True
        if not self._is_around:
            self._depth -= 1
            if self._depth <= 0:
                self._depth = 0
                self._after(optimizer)


def _steps_to_nest(kind: type[torch.optim.Optimizer]) -> int:
    """Returns how many steps of classes one call can nest.

    These are the steps that the class has or inherits.
    """
    steps = (vars(each)["step"] for each in kind.__mro__ if "step" in vars(each) and each is not torch.optim.Optimizer)
    return len({inspect.unwrap(step) for step in steps})


def pieces(parameter: NamedParameter, value: torch.Tensor) -> Iterator[tuple[str, torch.Tensor, Region | None]]:
    """Yields the leaves of a parameter, or of a tensor of its state.

    A flat parameter has one leaf for each slice; any other tensor is one leaf.

    Yields:
        The leaf's name, its memory, and its region of the whole.
    """
    if not parameter.runs or value.shape != parameter.local.shape:
        yield parameter.name, value, state_region(parameter, value)
        return
    for run in parameter.runs:
        yield run.name, value.detach()[run.at : run.at + run.size], run.box


def _add_pieces(
    index: TensorIndex, name_prefix: str, place: Mapping[Any, Any], key: object, parameter: NamedParameter
) -> None:
    """Adds `place[key]`, a parameter or a tensor of its state, to the index.

    `name_prefix` is put before the name.
    """
    value = place[key]
    for name, piece, box in pieces(parameter, value):
        if piece is value:
            index.add(name_prefix + name, place, key, value, box=box)
        else:
            index.add(name_prefix + name, {name: piece}, name, piece, box=box)
    if parameter.runs:
        index.track_entry(place, key, value)
        index.track_address(value)


def track_group(index: TensorIndex, group: Mapping[str, Any]) -> None:
    """Tracks a group's parameters and tensors, and that nothing else becomes a tensor."""
    index.track_entry(group, "params", group["params"])
    index.track_entries(group["params"])
    for key, each in group.items():
        if isinstance(each, torch.Tensor):
            index.track_entry(group, key, each)
    index.track_others(group)


def _make_in_group(prefix: str, groups: Sequence[dict[str, Any]], leaf: Leaf, names: ParameterNames) -> bool:
    """Makes a tensor that training put into a group; False for any other leaf."""
    match = GROUP_TENSOR.fullmatch(leaf.name.removeprefix(f"{prefix}."))
    if match is None or int(match[1]) >= len(groups) or leaf.shape != leaf.global_shape:
        return False
    on_device = StateForm.of(leaf).on_host is False
    device = device_of(named.local for named in names.values()) if on_device else "cpu"
    made = torch.empty_strided(leaf.shape, leaf.stride, dtype=getattr(torch, leaf.dtype), device=device)
    groups[int(match[1])][match[2]] = made
    return True


def _track(index: TensorIndex, container: Mapping[Any, Any] | Sequence[Any]) -> None:
    """Tracks a container of the state: all entries, or those with tensors of a dict with numbers.

    A number is another object after each step. In a list each entry counts, as their order does.
    """
    if all(map(has_tensors, container.values() if isinstance(container, Mapping) else container)):
        index.track_entries(container)
    elif isinstance(container, Mapping):
        index.track_others(container)
    else:
        index.track_entries(container)
        index.track_others(dict(enumerate(container)))  # a list in it may get a tensor


def _tensors_in(
    index: TensorIndex, place: Any, key: Any, keys: tuple[str, ...] = ()
) -> Iterator[tuple[Any, Any, tuple[str, ...]]]:
    """Yields (place, key, keys) of each tensor in `place[key]`.

    Tracks the lists and dicts on the way. `keys` leads from the value of the state to the tensor.
    """
    value = place[key]
    if isinstance(value, torch.Tensor):
        yield place, key, keys
        return
    index.track_entry(place, key, value)
    _track(index, value)
    for inner, each in entries(value):
        if has_tensors(each):
            yield from _tensors_in(index, value, inner, (*keys, str(inner)))


def _add_state(
    index: TensorIndex,
    name_prefix: str,
    place: Any,
    place_key: Any,
    keys: tuple[str, ...],
    parameter: NamedParameter,
    key: str,
    on_device: set[int],
) -> bool:
    """Adds a tensor of a parameter's state, with the forms of its leaves.

    Returns:
        False if another leaf has the memory.

    Args:
        index: the index.
        name_prefix: is put before the parameter's name.
        place, place_key: `place[place_key]` is the tensor.
        keys: keys of the lists and dicts around the tensor.
        parameter: the parameter.
        key: the key in the parameter's state.
        on_device: see `_with_steps_on_device`.

    Raises:
        UnsupportedState: a restore could not make the tensor again.
    """
    value = place[place_key]
    name = "/".join((name_prefix + parameter.name, *keys))
    added = index.add(name, place, place_key, value, box=state_region(parameter, value))
    for leaf, inner in added:
        if leaf:
            expected = _is_on_host(key, tuple(inner.tensor.shape), parameter, on_device)
            is_on_host = inner.tensor.device.type == "cpu"
            on_host = None if parameter.local.device.type == "cpu" or is_on_host == expected else is_on_host
            index.forms[leaf] = _form(leaf, index.boxes.get(leaf), parameter, keys, value, inner, on_host)
        elif keys or inner.path:
            raise _shares_memory(name)
    return all(leaf for leaf, _ in added)


def _form(
    leaf: str,
    box: Region | None,
    parameter: NamedParameter,
    keys: tuple[str, ...],
    value: torch.Tensor,
    inner: InnerTensor,
    on_host: bool | None = None,
) -> str:
    wrappers = wrappers_of(leaf, parameter, keys, value, inner)
    return StateForm(wrappers, box.tag if box is not None else "", on_host).text()


def _foreseen_leaves(
    prefix: str, key: str, parameter: NamedParameter, value: Any, keys: tuple[str, ...] = ()
) -> Iterator[Leaf]:
    """Yields the leaves of a value of the state that lies on `meta`."""
    _check_key(prefix, key)
    for inner_key, each in entries(value):
        yield from _foreseen_leaves(prefix, key, parameter, each, (*keys, str(inner_key)))
    if not isinstance(value, torch.Tensor):
        return
    for owner, piece, box in pieces(parameter, value):
        name = "/".join((f"{prefix}.{key}.{owner}", *keys))
        local, dtensor_region = local_piece(name, piece)
        for inner in inner_tensors(name, local):
            region = inner_region(local, dtensor_region or box, inner.tensor)
            leaf = "/".join((name, *inner.path)) + (region.tag if region else "")
            form = "" if piece is not value else _form(leaf, region, parameter, keys, value, inner)
            yield leaf_of(leaf, inner.tensor, False, region, form)


def _check_flat(name: str, parameter: NamedParameter, keys: tuple[str, ...], value: torch.Tensor) -> None:
    """Refuses state of a flat parameter that is not one plain tensor: its slices are the leaves."""
    if keys or has_inner_tensors(value):
        kind = "a list or dict" if keys else type(value).__name__
        raise UnsupportedState(f"{name}{parameter.name} is {kind}; a flat parameter's state must be plain tensors.")


def state_region(parameter: NamedParameter, value: torch.Tensor) -> Region | None:
    """Returns the region of a plain tensor of a parameter's state.

    Scalars, and state of whole parameters, are whole. State with the shape of a sharded parameter's
    piece has the piece's region. State of any other shape belongs to that piece only, and its name
    says to which piece.
    """
    if parameter.box is None or isinstance(value, DTensor) or not value.dim():
        return None
    local = tuple(parameter.local.shape)
    if tuple(value.shape) == local:
        return parameter.box
    return piece_region(local, parameter.box, tuple(value.shape))


def _is_empty_piece(named: NamedParameter) -> bool:
    """Returns whether the parameter is a plain piece without elements."""
    return named.box is not None and not isinstance(named.tensor, DTensor) and not named.local.numel()


def _with_steps_on_device(optimizer: torch.optim.Optimizer) -> set[int]:
    """Returns ids of the parameters whose `step` lies on their device.

    The kernels of their groups read `step` there, not on the host. This follows torch's
    Optimizer._process_value_according_to_param_policy. All other state lies beside its parameter.
    """
    groups = (each for each in optimizer.param_groups if each.get("fused") or each.get("capturable"))
    return {id(parameter) for group in groups for parameter in group["params"]}


def _is_on_host(key: str, shape: tuple[int, ...], parameter: NamedParameter, on_device: set[int]) -> bool:
    """Returns whether torch's own optimizers keep such a tensor on the host."""
    return key == "step" and not shape and id(parameter.tensor) not in on_device


def _allocate(leaf: Leaf, parameter: torch.Tensor, buffer: HugePageBuffer, on_host: bool) -> torch.Tensor:
    """Returns memory for one leaf of optimizer state.

    Args:
        leaf: the leaf.
        parameter: the parameter's local tensor, whose device the state shares.
        buffer: host memory.
        on_host: whether the leaf lies on the host even if the parameter does not.
    """
    dtype, stride = getattr(torch, leaf.dtype), parameter.stride()
    has_other_strides = stride != leaf.stride and tuple(parameter.shape) == leaf.shape
    if has_other_strides and is_dense(parameter) and plain_strides(leaf.shape, stride) == leaf.stride:
        # Like the optimizer's own: fused kernels compare strides, also of dimensions of size 1.
        # A parameter with gaps, such as columns of a wider tensor, has state without gaps.
        leaf = replace(leaf, stride=stride)
    if on_host or parameter.device.type == "cpu":
        return buffer.empty(leaf, dtype)
    return torch.empty_strided(leaf.shape, leaf.stride, dtype=dtype, device=parameter.device)


def _group_tensors(groups: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """Returns the tensors in an optimizer's groups, and which of them are the same object.

    Each entry is [group, key, group and key of the first place with the tensor]. Only the first
    place is a leaf. Example: one tensor as the learning rate of all groups.
    """
    first: dict[int, list[Any]] = {}
    places = [
        (each, [g, key])
        for g, group in enumerate(groups)
        for key, each in group.items()
        if isinstance(each, torch.Tensor)
    ]
    return [[*place, *first.setdefault(id(each), place)] for each, place in places]


def _share_group_tensors(groups: Sequence[MutableMapping[str, Any]], saved: Iterable[Sequence[Any]]) -> None:
    """Puts the first tensor into all places that had it and have none.

    Raises:
        LayoutChanged: there is no such tensor.
    """
    for g, key, first, first_key in saved:
        if isinstance(groups[g].get(key), torch.Tensor):
            continue
        if not isinstance(tensor := groups[first].get(first_key), torch.Tensor):
            raise LayoutChanged(
                f"group {g} of the snapshot's optimizer has a tensor {key!r} that shares memory with other state; this job's "
                "group has none."
            )
        groups[g][key] = tensor


def _shared_tensors(owner: torch.optim.Optimizer, names: ParameterNames) -> list[list[str]]:
    """Returns which tensors of the state have the memory of a parameter, or occur again.

    Each entry is (parameter, key, first parameter that has the memory, key there, or ITSELF). Such
    memory is a leaf under its first name only. Examples: the code tables that bitsandbytes gives to
    all parameters; `p.detach().float()` as the master of a parameter that is float32 already.
    """
    first: dict[Hashable, list[str]] = {}
    for named in names.values():
        first.setdefault(_memory(named.local), [named.name, ITSELF])
    repeated = []
    for parameter in (each for group in owner.param_groups for each in group["params"]):
        for key, each in owner.state.get(parameter, {}).items():
            if isinstance(each, torch.Tensor):
                place = [names[id(parameter)].name, key]
                before = first.setdefault(_memory(each), place)
                if before is not place:
                    repeated.append([*place, *before])
    return repeated


def _memory(tensor: torch.Tensor) -> Hashable:
    """Returns what tells the tensor's memory from that of others."""
    local, _ = local_piece("a tensor of the state", tensor)
    return identity_of(local) if type(local) in PLAIN_TYPES and local.numel() else id(tensor)


def _check_shared(
    prefix: str, known: Sequence[tuple[str, str]], owner: torch.optim.Optimizer, names: ParameterNames
) -> None:
    """Refuses tensors that are no leaves, and that `_share_tensors` could not make again.

    Args:
        prefix: of the optimizer.
        known: parameter and key of each tensor whose memory has a leaf already.
        owner: the optimizer with the state.
        names: of all parameters.

    Raises:
        UnsupportedState: the memory is that of a buffer, or of another optimizer's state.
    """
    shared = {(name, key) for name, key, _, _ in _shared_tensors(owner, names)} if known else set()
    for name, key in known:
        if (name, key) not in shared:
            raise _shares_memory(f"{prefix}.{key}.{name}")


def _shares_memory(name: str) -> UnsupportedState:
    return UnsupportedState(
        f"{name} shares memory with another tensor of the state, and a restore could not make it so again.",
        "clone() it in the optimizer's step",
    )


def _share_tensors(owner: torch.optim.Optimizer, names: ParameterNames, saved: Iterable[Sequence[str]]) -> None:
    """Puts tensors into all places that had the same memory; reverses `_shared_tensors`."""
    live = {named.name: named for named in names.values()}
    held = {names[id(p)].name for group in owner.param_groups for p in group["params"]}
    for name, key, first, first_key in saved:
        if name not in held or first not in live:
            continue
        source = live[first]
        if first_key == ITSELF:
            whole = source.tensor if isinstance(source.tensor, DTensor) else source.local
            owner.state[live[name].tensor][key] = whole.detach()
        elif first_key in owner.state.get(source.tensor, {}):
            owner.state[live[name].tensor][key] = owner.state[source.tensor][first_key]


def _scalars(state: Mapping[torch.Tensor, Mapping[str, Any]], names: ParameterNames) -> dict[str, dict[str, Any]]:
    """Returns the numbers in the state, by parameter."""
    plain = (
        (
            key,
            {
                name: to_plain(without_tensors(each))
                for name, each in values.items()
                if not isinstance(each, torch.Tensor)
            },
        )
        for key, values in state.items()
    )
    return {names[id(key)].name: values for key, values in plain if values and id(key) in names}


def _forget_keys(optimizer: torch.optim.Optimizer, group: MutableMapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Removes what training had removed from a group.

    Settings of the optimizer stay, since an older torch has fewer.
    """
    for key in [*group]:
        if key not in saved and key not in optimizer.defaults and key != "params" and not has_tensors(group[key]):
            del group[key]


def _plain_values(values: Mapping[str, Any], without: str = "") -> dict[str, Any]:
    """Returns the values that are no tensors, and so no leaves."""
    return {key: to_plain(v) for key, v in values.items() if not isinstance(v, torch.Tensor) and key != without}
