"""Each optimizer step is counted once, at its end, whatever calls or wraps the step."""

from __future__ import annotations

import contextlib
import copy
import gc
import inspect
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim.lr_scheduler import ExponentialLR

from reft.client.state.extract.optimizers import OptimizerExtractor
from reft.client.state.extract.wrapping import WrappedMethod

torch.optim.SGD([nn.Parameter(torch.zeros(1))])  # torch wraps a class's step at its first object


class Nested(torch.optim.SGD):
    """Calls its parent's step, which also calls the hooks.

    May fail before or behind that step.
    """

    fails = ""

    def step(self, closure=None):
        if self.fails == "before":
            raise RuntimeError
        loss = super().step(closure)
        if self.fails == "behind":
            raise RuntimeError
        return loss


class Careful(torch.optim.SGD):
    """Ignores an error of its parent's step."""

    def step(self, closure=None):
        with contextlib.suppress(RuntimeError):
            super().step(self._fail)

    def _fail(self):
        raise RuntimeError


class Alone(torch.optim.SGD):
    """Does not call its parent's step; may fail."""

    fails = False

    def step(self, closure=None):
        if self.fails:
            raise RuntimeError


class Recursive(torch.optim.SGD):
    """Steps twice in one step, through the instance's attribute."""

    is_inside = False

    def step(self, closure=None):
        if not self.is_inside:
            self.is_inside = True
            self.step()
            self.is_inside = False
        return super().step(closure)


def make(kind=torch.optim.SGD, **options):
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    return kind([parameter], lr=0.1, **options)


class Hooked:
    """The hooks of an optimizer, with counters.

    `ends` has the parameter's value at the end of each step.
    """

    def __init__(self, optimizer):
        self.begins, self.ends = 0, []
        self._hooks = OptimizerExtractor().hook(optimizer, self._before, self._after)

    def _before(self, *_):
        self.begins += 1

    def _after(self, optimizer):
        self.ends.append(round(optimizer.param_groups[0]["params"][0][0].item(), 3))

    def remove(self):
        for hook in self._hooks:
            hook.remove()


def bound_before(optimizer):
    """Returns the step as it is now, so that calls bypass later wrappers."""
    return optimizer.step


def looked_up(optimizer):
    """Returns a function that looks up the step at each call, as training loops do."""
    return lambda: optimizer.step()


def compiled(optimizer):
    """Returns the step as it is now, compiled."""
    torch._dynamo.reset()
    return torch.compile(optimizer.step, backend="eager")


@pytest.mark.parametrize("get_step", [looked_up, bound_before, compiled])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, Nested])
def test_a_step_counts_once_even_if_it_calls_its_parents_step(kind, get_step):
    optimizer = make(kind)
    step = get_step(optimizer)
    hooked = Hooked(optimizer)
    for calls in (1, 2, 3):
        step()
        assert len(hooked.ends) == calls
    hooked.remove()
    step()
    assert len(hooked.ends) == 3


def test_a_step_compiled_while_hooked_counts_once():
    optimizer = make(Nested)
    hooked = Hooked(optimizer)
    step = compiled(optimizer)
    for calls in (1, 2, 3):
        step()
        assert len(hooked.ends) == calls
    hooked.remove()
    step()
    assert len(hooked.ends) == 3 and optimizer.param_groups[0]["params"][0][0].item() == pytest.approx(0.6)


def test_a_compiled_step_set_on_the_instance_counts_once():
    optimizer = make(Nested)
    mine = optimizer.step = compiled(optimizer)
    hooked = Hooked(optimizer)
    for calls in (1, 2):
        optimizer.step()
        assert len(hooked.ends) == calls
    hooked.remove()
    assert optimizer.step is mine


@pytest.mark.parametrize("get_step", [looked_up, bound_before, compiled])
@pytest.mark.parametrize("fails", ["before", "behind"])
def test_a_step_that_raises_does_not_count_and_the_next_one_does(fails, get_step):
    optimizer = make(Nested)
    step = get_step(optimizer)
    hooked = Hooked(optimizer)
    for _ in range(2):
        optimizer.fails = fails
        with pytest.raises(RuntimeError):
            step()
        assert not hooked.ends
    optimizer.fails = ""
    for calls in (1, 2):
        step()
        assert len(hooked.ends) == calls
    value = round(optimizer.param_groups[0]["params"][0][0].item(), 3)
    assert hooked.ends[-1] == value, "not at the end of the parent's step"


@pytest.mark.parametrize("get_step", [looked_up, bound_before])
def test_a_step_without_a_parents_step_counts_again_after_an_error(get_step, monkeypatch):
    optimizer = make(torch.optim.AdamW)
    step = get_step(optimizer)
    hooked = Hooked(optimizer)
    with monkeypatch.context() as broken, pytest.raises(ZeroDivisionError):
        broken.setattr(torch.optim.AdamW, "_init_group", lambda *_: 1 / 0)
        step()
    step()
    assert len(hooked.ends) == 1


def test_a_call_that_bypasses_the_wrapper_does_not_disturb_the_next_call():
    optimizer = make(Careful)
    step = bound_before(optimizer)
    hooked = Hooked(optimizer)
    step()
    optimizer.step()
    assert len(hooked.ends) == 1, "the parent's step raised, and the first call cannot see that"


def test_a_step_that_never_calls_its_parents_step_counts_again_after_an_error():
    optimizer = make(Alone)
    hooked = Hooked(optimizer)
    optimizer.fails = True
    with pytest.raises(RuntimeError):
        optimizer.step()
    optimizer.fails = False
    for calls in (1, 2):
        optimizer.step()
        assert len(hooked.ends) == calls


@pytest.mark.parametrize("kind", [Careful, Recursive])
def test_a_step_counts_once_if_its_parents_step_raises_or_it_calls_itself(kind):
    optimizer = make(kind)
    hooked = Hooked(optimizer)
    for calls in (1, 2):
        optimizer.step()
        assert len(hooked.ends) == calls


def test_a_users_wrapper_that_does_not_step_counts_nothing():
    optimizer = make()
    optimizer.step = lambda *_: None
    hooked = Hooked(optimizer)
    optimizer.step()
    assert not hooked.ends


@pytest.mark.parametrize("kind", [torch.optim.SGD, Nested])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_scheduler_works_in_both_orders_without_new_warnings(is_first, kind):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = make(kind)
        scheduler = ExponentialLR(optimizer, 0.5) if is_first else None
        theirs = vars(optimizer).get("step")
        hooked = Hooked(optimizer)
        scheduler = scheduler or ExponentialLR(optimizer, 0.5)
        assert "closure" in inspect.signature(optimizer.step).parameters
        optimizer._opt_called = False
        for calls in (1, 2):
            optimizer.step()
            scheduler.step()
            assert len(hooked.ends) == calls and optimizer._opt_called, "torch sets it in the scheduler's wrapper"
        hooked.remove()
        if is_first:
            assert optimizer.step is theirs, "the scheduler's wrapper is put back"
        assert optimizer.step._wrapped_by_lr_sched
        again = Hooked(optimizer)  # another session
        optimizer.step()
        scheduler.step()
        ExponentialLR(optimizer, 0.5)
        assert len(again.ends) == 1 and len(hooked.ends) == 2
        again.remove()
        optimizer.step()
        assert len(again.ends) == 1 and optimizer.step._wrapped_by_lr_sched


def test_a_scheduler_that_steps_first_still_warns():
    optimizer = make()
    hooked = Hooked(optimizer)
    scheduler = ExponentialLR(optimizer, 0.5)
    with pytest.warns(UserWarning, match=r"lr_scheduler.step\(\)` before `optimizer.step\(\)"):
        scheduler.step()
    assert not hooked.ends


def test_a_wrapper_kept_by_a_scheduler_does_not_keep_the_optimizer():
    optimizer = make()
    hooked = Hooked(optimizer)
    scheduler = ExponentialLR(optimizer, 0.5)
    hooked.remove()
    reference = weakref.ref(optimizer)
    gc.disable()
    try:
        del optimizer, scheduler
        assert reference() is None, "a reference cycle keeps the optimizer and its state"
    finally:
        gc.enable()


def test_steps_that_a_scaler_skips_are_not_counted():
    optimizer = make()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    hooked = Hooked(optimizer)
    for gradient, calls in ((1.0, 1), (float("inf"), 1), (1.0, 2)):
        optimizer.zero_grad()
        scaler.scale(gradient * optimizer.param_groups[0]["params"][0].sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert len(hooked.ends) == calls


def test_copies_of_a_hooked_optimizer_work_and_are_not_hooked():
    optimizer = make(momentum=0.9)
    hooked = Hooked(optimizer)
    optimizer.step()
    for copied in (copy.deepcopy(optimizer), copy.copy(optimizer)):
        assert "step" not in vars(copied)
        before = copied.param_groups[0]["params"][0].clone()
        copied.param_groups[0]["params"][0].grad = torch.ones(2)
        copied.step()
        assert not torch.equal(copied.param_groups[0]["params"][0], before)
    assert len(hooked.ends) == 1
    assert optimizer.state_dict().keys() == {"state", "param_groups"}


def test_an_optimizer_around_an_optimizer_counts_once(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        parameter = nn.Parameter(torch.ones(2))
        optimizer = ZeroRedundancyOptimizer([parameter], torch.optim.SGD, lr=0.1)
        hooked = Hooked(optimizer)
        scheduler = ExponentialLR(optimizer, 0.5)
        for calls in (1, 2):
            parameter.grad = torch.ones(2)
            optimizer.step()
            scheduler.step()
            assert len(hooked.ends) == hooked.begins == calls
        hooked.remove()
    finally:
        torch.distributed.destroy_process_group()


def test_remove_puts_the_hidden_step_back():
    optimizer = make(Nested)
    hooked = Hooked(optimizer)
    assert "step" in vars(optimizer)
    hooked.remove()
    assert "step" not in vars(optimizer)
    hooked.remove()
    assert "step" not in vars(optimizer)


def test_a_later_wrapper_stays_after_remove():
    optimizer = make()
    hooked = Hooked(optimizer)
    ours = optimizer.step
    optimizer.step = theirs = lambda *args: ours(*args)
    hooked.remove()
    assert optimizer.step is theirs
    optimizer.step()
    assert not hooked.ends and optimizer.param_groups[0]["params"][0][0].item() == pytest.approx(0.9)


class Engine:
    """An object with a method that may fail."""

    fails = False

    def train(self, by):
        return 1 / (not self.fails) + by


def test_a_wrapped_method_keeps_its_arguments_result_and_error():
    engine, calls = Engine(), []

    def around(owner, call, *args, **kwargs):
        calls.append((owner, args, kwargs))
        return 10 * call(*args, **kwargs)

    wrapped = WrappedMethod(engine, "train", around)
    assert engine.train(1) == engine.train(by=1) == 20
    assert calls == [(engine, (1,), {}), (engine, (), {"by": 1})]
    engine.fails = True
    with pytest.raises(ZeroDivisionError):
        engine.train(1)
    engine.fails = False
    wrapped.remove()
    assert engine.train(1) == 2 and not vars(engine).keys() - {"fails"}


def test_a_removed_wrapper_below_another_passes_calls_on():
    engine, calls = Engine(), []
    wrapped = WrappedMethod(engine, "train", lambda owner, call, by: calls.append(by) or call(by))
    ours = engine.train
    engine.train = lambda by: ours(by)
    assert engine.train(1) == 2 and calls == [1]
    wrapped.remove()
    assert engine.train(1) == 2 and calls == [1]
