"""Rules: how a kind of module turns its inputs and the gradient at its output into gradients of single samples.

A rule is a function `(module, inputs, grad_output) -> {parameter name: SampleGradients}`. Both tensors have the
samples in front and what belongs to a sample behind: a `Linear` sees (N, ..., I) and (N, ..., O). A module without a
rule is computed once more for each sample (`calls.py`), which is slower and always right.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from copy import copy
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from peft_surgical.fisher.gradients import DenseGradients, ProductGradients, RowGradients, SampleGradients
from peft_surgical.fisher.squares import sum_normalized, sum_type


Rule = Callable[[nn.Module, Tensor, Tensor], Mapping[str, SampleGradients]]

RULES: dict[type[nn.Module], Rule] = {}
"""The rules by class; a subclass has its parent's unless it has one, or a `forward`, of its own."""


def register_rule(*classes: type[nn.Module]) -> Callable[[Rule], Rule]:
    """Register a rule for modules of these classes.

    Args:
        classes: The classes. Their instances must be called with one tensor and return one, each sample by itself.

    Returns:
        A decorator for the rule.

    Example:

        >>> class Scale(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.factor = nn.Parameter(torch.ones(()))
        ...     def forward(self, x):
        ...         return self.factor * x
        >>> @register_rule(Scale)
        ... def scale(module, inputs, grad_output):
        ...     return {"factor": DenseGradients((inputs * grad_output).flatten(1).sum(1))}
        >>> find_rule(Scale()) is scale
        True
    """

    def register(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(classes, rule))
        return rule

    return register


def find_rule(module: nn.Module) -> Rule | None:
    """The rule for a module, or None."""
    if is_packed_linear(module):
        return linear
    for cls in type(module).__mro__:
        if cls in RULES:
            # the weight of a quantised module is what its output is linear in, whatever its class does
            packed = any(not p.is_floating_point() or p.is_meta for p in module.parameters())
            return RULES[cls] if packed or type(module).forward is cls.forward else None
    key = _what_it_computes(module)
    if key is None:
        return _rule_by_trial(module)
    if key not in _tried:
        _tried[key] = _rule_by_trial(module)
    return _tried[key]


_tried: dict[Hashable, Rule | None] = {}


@register_rule(nn.Linear)
def linear(module: nn.Module, inputs: Tensor, grad_output: Tensor) -> Mapping[str, SampleGradients]:
    """y = W x + b"""
    g, x = grad_output.flatten(1, -2), inputs.flatten(1, -2)
    return {"weight": ProductGradients(g, x)} | _bias(module, g)


@register_rule(Conv1D)
def transposed_linear(module: nn.Module, inputs: Tensor, grad_output: Tensor) -> Mapping[str, SampleGradients]:
    """y = x W + b, the linear map of GPT-2"""
    g, x = grad_output.flatten(1, -2), inputs.flatten(1, -2)
    return {"weight": ProductGradients(x, g)} | _bias(module, g)


@register_rule(nn.LayerNorm)
def layer_norm(module: nn.Module, inputs: Tensor, grad_output: Tensor) -> Mapping[str, SampleGradients]:
    """y = w * normal(x) + b"""
    assert isinstance(module, nn.LayerNorm)
    dims = len(module.normalized_shape)
    g, x = (t.flatten(-dims).flatten(1, -2) for t in (grad_output, inputs))
    weight, bias = sum_normalized(g, x, module.eps).view(len(g), 2, *module.normalized_shape).unbind(1)
    return {"weight": DenseGradients(weight), "bias": DenseGradients(bias)}


@register_rule(nn.Embedding)
def embedding(module: nn.Module, inputs: Tensor, grad_output: Tensor) -> Mapping[str, SampleGradients]:
    """y = W[x]"""
    assert isinstance(module, nn.Embedding)
    rows, g = inputs.flatten(1), grad_output.flatten(1, -2)
    if module.padding_idx is not None:
        g = g.masked_fill((rows == module.padding_idx)[..., None], 0)
    return {"weight": RowGradients(rows, g, module.num_embeddings)}


@register_rule(nn.Conv1d, nn.Conv2d)
def convolution(module: nn.Module, inputs: Tensor, grad_output: Tensor) -> Mapping[str, SampleGradients]:
    """A linear map of patches. Inputs are (N, M, C, ...): M images, or sequences, to a sample."""
    assert isinstance(module, (nn.Conv1d, nn.Conv2d))
    x, g = inputs.flatten(0, 1), grad_output.flatten(0, 1)
    kernel, stride, dilation = module.kernel_size, module.stride, module.dilation
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    x = F.pad(x, module._reversed_padding_repeated_twice, mode)
    if x.dim() == 3:  # unfold knows images only
        x, kernel, stride, dilation = x[:, :, None], (1, *kernel), (1, *stride), (1, *dilation)
    groups, samples = module.groups, len(inputs)
    patches = F.unfold(x, kernel, dilation=dilation, stride=stride)  # (N M, C K, places)
    left, right = _by_token(g.flatten(2), samples), _by_token(patches, samples)
    bias = _bias(module, left)
    if groups == 1:
        return {"weight": ProductGradients(left, right, module.weight.shape)} | bias
    left, right = (t.unflatten(-1, (groups, -1)) for t in (left, right))
    weight = torch.einsum("ntgo,ntgi->ngoi", left, right).reshape(samples, *module.weight.shape)
    return {"weight": DenseGradients(weight)} | bias


def gain(module: nn.Module, inputs: Tensor, grad_output: Tensor) -> Mapping[str, SampleGradients]:
    """y = (w + c) * u(x), as in every RMSNorm and layer scale: dy/dw = u, found by putting in two values of w"""
    ((name, weight),) = module.named_parameters(recurse=False)
    one = torch.ones(weight.shape, dtype=weight.dtype, device=inputs.device)  # the weight itself may be offloaded
    u = _with_weight(module, name, one, inputs) - _with_weight(module, name, torch.zeros_like(one), inputs)
    return {name: _sum_over_tokens(grad_output * u, weight.dim())}


def rms_norm(module: nn.Module, inputs: Tensor, grad_output: Tensor) -> Mapping[str, SampleGradients]:
    """y = (w + c) * x / rms(x), the gain of most language models"""
    ((name, _),) = module.named_parameters(recurse=False)
    g, x = grad_output.flatten(1, -2), inputs.flatten(1, -2)
    return {name: DenseGradients(sum_normalized(g, x, _epsilon(module), center=False)[:, 0])}


def try_gain(module: nn.Module) -> tuple[Tensor, Tensor] | None:
    """If a module's output is linear in its one parameter, a vector, entry by entry of the last dimension: some inputs
    x, and u(x).

    This is tried out, for transformers has dozens of classes for it.
    """
    parameters = list(module.named_parameters(recurse=False))
    if len(parameters) != 1 or any(True for _ in module.children()) or parameters[0][1].dim() != 1:
        return None
    name, weight = parameters[0]
    if not weight.is_floating_point():
        return None
    x, w = _trial_numbers(len(weight), torch.device("cpu") if weight.is_meta else weight.device)
    try:
        zero, one, other = (_with_weight(module, name, v, x) for v in (torch.zeros_like(w), torch.ones_like(w), w))
    except Exception:  # noqa: BLE001  a module of another kind may raise anything
        return None
    if not isinstance(other, Tensor) or other.shape != x.shape:
        return None
    u = one - zero
    return (x, u) if torch.allclose(other, zero + u * w, rtol=1e-4, atol=1e-5) else None


def _rule_by_trial(module: nn.Module) -> Rule | None:
    tried = try_gain(module)
    if tried is None:
        return None
    return rms_norm if _is_rms_norm(module, *tried) else gain


def _what_it_computes(module: nn.Module) -> Hashable:
    """The same for modules that compute the same but for their weights, so that one of a model's many normalisations
    is tried out for all; None where that cannot be told."""
    attributes = {name: value for name, value in vars(module).items() if name not in _OF_EVERY_MODULE}
    if module._buffers or module._modules or not all(isinstance(value, _NUMBERS) for value in attributes.values()):
        return None
    weights = tuple((name, p.shape, p.dtype, p.device) for name, p in module._parameters.items() if p is not None)
    return type(module), type(module).forward, weights, module.training, tuple(attributes.items())


_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_NUMBERS = (int, float, str, torch.dtype, torch.Size, type(None))


@lru_cache(maxsize=4)
def _trial_numbers(width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Inputs, of which no other dimension is as wide, the first so small that an epsilon shows; and a weight."""
    generator = torch.Generator().manual_seed(0)
    samples, tokens = (2, 3) if width > 3 else (4, 5)
    x, w = torch.randn(samples, tokens, width, generator=generator), torch.randn(width, generator=generator)
    x[0] *= 1e-3
    return x.to(device), w.to(device)


def _is_rms_norm(module: nn.Module, x: Tensor, u: Tensor) -> bool:
    epsilon = _epsilon(module)
    if not isinstance(epsilon, float):
        return False
    return torch.allclose(u, x * (x.square().mean(-1, keepdim=True) + epsilon).rsqrt(), rtol=1e-4, atol=1e-5)


def _epsilon(module: Any) -> Any:
    """What a normalisation adds to the mean square, by the names that transformers and torch have for it."""
    return getattr(module, "variance_epsilon", getattr(module, "eps", None))


def is_packed_linear(module: nn.Module) -> bool:
    """Whether a module is a linear map whose weight is no parameter, but packed into integer buffers (GPTQ, AWQ)."""
    if "weight" in module._parameters or not module._buffers:
        return False
    sizes = (getattr(module, "in_features", None), getattr(module, "out_features", None))
    return all(isinstance(size, int) for size in sizes) and any(
        b is not None and not b.is_floating_point() for b in module._buffers.values()
    )


def _bias(module: nn.Module, g: Tensor) -> dict[str, SampleGradients]:
    """The gradients of a bias, if there is one."""
    return {} if getattr(module, "bias", None) is None else {"bias": _sum_over_tokens(g)}


def _sum_over_tokens(x: Tensor, dims: int = 1) -> DenseGradients:
    """Sum (N, ..., *shape) over everything between the samples and the last `dims` dimensions."""
    if x.dim() != dims + 2:
        x = x.reshape(len(x), -1, *x.shape[x.dim() - dims :])
    return DenseGradients(x.sum(1, dtype=sum_type(x.dtype)))


def _by_token(x: Tensor, samples: int) -> Tensor:
    """From (N M, C, places) to (N, M places, C)."""
    return x.transpose(1, 2).reshape(samples, -1, x.shape[1])


def _with_weight(module: nn.Module, name: str, weight: Tensor, inputs: Tensor) -> Tensor:
    """The module's output with another weight. Hooks, as of an offloaded module, are left out."""
    twin: Any = copy(module)
    twin._parameters = {name: weight}
    return type(twin).forward(twin, inputs)
