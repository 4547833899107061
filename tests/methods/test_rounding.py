"""Stochastic rounding of bfloat16 parameters, against exact arithmetic, torch's AdamW and plain loops."""

from __future__ import annotations

import copy
import math
import random

import pytest
import torch
from peft import get_peft_model
from tiny_models import batch, build
from torch import nn
from transformers import Trainer, TrainingArguments

from peft_surgical import SurgicalConfig, round_stochastically
from peft_surgical.methods.rounding import round_at_random


ADAMW = round_stochastically(torch.optim.AdamW)
SPECIAL = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45, -3e38, 3.4028e38])


def neighbours(value: float) -> tuple[float, float]:
    """The bfloat16 numbers at or around a value, by a search through all of them."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).double()
    every = every[every.isfinite()].unique()
    return float(every[every <= value].max()), float(every[every >= value].min())


@pytest.mark.parametrize("value", [1.003, -1.003, 1e-30, -7.77e5, 3e-39, 1 + 2**-8, 0.99999])
def test_rounding_is_to_a_neighbour_and_right_in_the_mean(value):
    values = torch.full((200_000,), value)
    low, high = neighbours(float(values[0]))
    drawn = round_at_random(values, torch.Generator().manual_seed(0)).double()
    assert set(drawn.unique().tolist()) <= {low, high}
    error = (high - low) * 0.5 / len(values) ** 0.5  # the most that a standard error can be
    assert abs(float(drawn.mean()) - float(values[0])) < 4 * error


def test_what_bfloat16_has_stays_as_it_is():
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    drawn = round_at_random(every.float(), torch.Generator().manual_seed(0))
    assert torch.equal(drawn[~every.isnan()], every[~every.isnan()])
    cuda_nan = torch.tensor([0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)  # all bits set: one more is zero
    assert drawn[every.isnan()].isnan().all()
    assert round_at_random(cuda_nan.repeat(999)).isnan().all()
    drawn = round_at_random(SPECIAL)
    assert torch.equal(drawn[:4].float(), SPECIAL[:4])
    assert drawn[4].isnan()


def problem(dtype: torch.dtype = torch.bfloat16) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape).to(dtype)) for shape in ((40, 30), (7,), (300,))]


def set_gradients(parameters: list[nn.Parameter], number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.AdamW, {}),
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.AdamW, {"foreach": True}),
        (torch.optim.AdamW, {"amsgrad": True}),
        (torch.optim.Adagrad, {}),  # its constructor makes the states
        (torch.optim.Adagrad, {"fused": True}),
    ],
)
def test_a_step_is_that_of_float32_parameters_rounded(kind, options):
    parameters, expected = problem(), [nn.Parameter(p.detach().float()) for p in problem()]
    ours = round_stochastically(kind)(parameters, lr=1e-2, **options)
    plain = kind(expected, lr=1e-2, **options)
    for number in range(3):
        set_gradients(parameters, number)
        given = [p.grad for p in parameters]
        for ideal, parameter in zip(expected, parameters, strict=True):
            ideal.data.copy_(parameter.data)
            ideal.grad = parameter.grad.float()
        ours.step()
        plain.step()
        generator = torch.Generator().manual_seed(random.Random(f"0 {number}").getrandbits(63))
        for ideal, parameter, gradient in zip(expected, parameters, given, strict=True):
            assert torch.equal(parameter.data, round_at_random(ideal.data, generator))
            assert parameter.grad is gradient
            for key, value in plain.state[ideal].items():
                assert torch.equal(ours.state[parameter][key], value), key


def test_small_steps_are_right_in_the_mean_and_lost_by_rounding_to_the_nearest():
    ours, nearest = (nn.Parameter(torch.ones(50_000, dtype=torch.bfloat16)) for _ in range(2))
    optimizers = [round_stochastically(torch.optim.SGD)([ours], lr=1e-4), torch.optim.SGD([nearest], lr=1e-4)]
    for _ in range(20):
        for parameter, optimizer in zip((ours, nearest), optimizers, strict=True):
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
    assert (nearest == 1).all()
    assert float(ours.double().mean()) == pytest.approx(1 - 20e-4, abs=1e-4)


def test_other_dtypes_are_left_to_the_optimizer():
    mixed, plain = (problem(torch.float32) for _ in range(2))
    mixed[1] = nn.Parameter(mixed[1].data.bfloat16())
    optimizers = ADAMW(mixed, lr=1e-2), torch.optim.AdamW(plain, lr=1e-2)
    for number in range(3):
        for parameters, optimizer in zip((mixed, plain), optimizers, strict=True):
            set_gradients(parameters, number)
            optimizer.step()
    assert torch.equal(mixed[0], plain[0])
    assert torch.equal(mixed[2], plain[2])


def test_what_is_drawn_depends_on_seed_and_step_alone_and_resumes():
    def run(optimizer, parameters, steps):
        for number in steps:
            set_gradients(parameters, number)
            torch.rand(number)  # other draws, as another process of DDP has
            optimizer.step()

    first, second = problem(), problem()
    run(ADAMW(first, lr=1e-2), first, range(6))
    torch.manual_seed(5)
    optimizer = ADAMW(second, lr=1e-2)
    run(optimizer, second, range(3))
    saved = copy.deepcopy(optimizer.state_dict())
    third = [nn.Parameter(p.detach().clone()) for p in second]
    resumed = ADAMW(third, lr=1e-2)
    resumed.load_state_dict(saved)
    assert all(state["exp_avg"].dtype == torch.float32 for state in resumed.state.values())
    run(resumed, third, range(3, 6))
    other = problem()
    run(round_stochastically(torch.optim.AdamW, seed=1)(other, lr=1e-2), other, range(6))
    assert all(torch.equal(a, b) for a, b in zip(first, third, strict=True))
    assert not torch.equal(first[0], other[0])


def test_hooks_of_a_step_run_once_and_closures_count():
    torch.optim.AdamW(problem())  # from the first on, the class calls the hooks
    parameters, calls = problem(), []
    optimizer = round_stochastically(torch.optim.AdamW)(parameters)
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    before = parameters[0].detach().clone()
    assert optimizer.step(lambda: set_gradients(parameters, 0) or 3.0) == 3.0
    assert calls == ["before", "after"]
    assert not torch.equal(before, parameters[0])


def test_hooks_on_gradients_stay():
    """DDP's reducer hangs on the node that accumulates a gradient, which a change of dtype would exchange."""
    parameter, called = problem()[0], []
    node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
    node.register_hook(lambda *_: called.append(True))
    optimizer = ADAMW([parameter])
    for steps in range(1, 3):
        parameter.sum().backward()
        assert len(called) == steps
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())


class CountsInItsGroup(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        self.param_groups[0]["k"] = self.param_groups[0].get("k", 0) + 1


@pytest.mark.parametrize("counted", [{}, {"k": 0}])
def test_an_optimizer_with_a_state_of_all_parameters_is_refused(counted):
    parameters = problem()
    optimizer = round_stochastically(CountsInItsGroup)(parameters)
    optimizer.param_groups[0].update(counted)
    set_gradients(parameters, 0)
    with pytest.raises(TypeError, match="CountsInItsGroup has a state of all parameters"):
        optimizer.step()
    with pytest.raises(TypeError, match="LBFGS computes the loss itself"):
        round_stochastically(torch.optim.LBFGS)


def test_trainer_resumes_in_the_middle(tmp_path):
    rows = [{k: v[0] for k, v in batch("bert", n=1, length=6, seed=i).items()} for i in range(8)]

    def trainer(folder, **options):
        torch.manual_seed(0)
        model = build("bert").bfloat16()
        model = get_peft_model(model, SurgicalConfig(layers=[1, 2]), autocast_adapter_dtype=False)
        arguments = TrainingArguments(
            str(folder),
            max_steps=6,
            save_steps=3,
            per_device_train_batch_size=2,
            report_to=[],
            use_cpu=True,
            **options,
        )
        optimizer, kwargs = Trainer.get_optimizer_cls_and_kwargs(arguments)
        return Trainer(
            model, arguments, train_dataset=rows, optimizer_cls_and_kwargs=(round_stochastically(optimizer), kwargs)
        )

    whole, again = trainer(tmp_path, learning_rate=1e-3), trainer(tmp_path, learning_rate=1e-3)
    whole.train()
    assert type(whole.optimizer.optimizer).__name__ == "AdamWRounded"
    again.train(resume_from_checkpoint=f"{tmp_path}/checkpoint-3")
    trained = [p for p in whole.model.parameters() if p.requires_grad]
    assert {p.dtype for p in trained} == {torch.bfloat16}
    for a, b in zip(trained, [p for p in again.model.parameters() if p.requires_grad], strict=True):
        assert torch.equal(a, b)
        assert whole.optimizer.state[a]["exp_avg"].dtype == torch.float32
        assert torch.equal(whole.optimizer.state[a]["exp_avg"], again.optimizer.state[b]["exp_avg"])
