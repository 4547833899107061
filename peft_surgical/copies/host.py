"""The base's own tensors in host memory, while an adapter that has copies of them is trained on an accelerator.

So training needs the accelerator's memory for one set of the tuned tensors, as plain fine-tuning does. Whatever else
needs the base's own (another adapter, none, a merge, a move of the model) brings them back first.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from typing_extensions import Self

from peft_surgical.copies.compute import DIRECT
from peft_surgical.distributed import ddp_around, engine_of, world_size


BASE_COPIES = ("auto", "host", "device")
_HOSTS = ("cpu", "meta", "mps")  # these have no other memory than the host's


def has_own_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor lies in other memory than the host's."""
    return tensor.device.type not in _HOSTS


class HostedBase(nn.Module):
    """A wrapper around a module of the base, whose tensors can be put into host memory for a while."""

    base_layer: nn.Module

    def __init__(self) -> None:
        super().__init__()
        self.was_base_used = False  # since it was set so
        self._away: dict[str, torch.device] = {}  # by name of a tensor in host memory: where it belongs
        self.left_out: list[str] = []  # of the base's parameters, which are plain attributes then

    @abstractmethod
    def base_tensor(self, name: str) -> torch.Tensor:
        """The base's tensor of a name in the module."""

    @abstractmethod
    def copied_names(self) -> Iterable[str]:
        """The base's tensors that an adapter has whole copies of."""

    def base_in_use(self) -> nn.Module:
        """The base's module, to compute with."""
        self.was_base_used = True
        self.bring_base_back()
        return self.base_layer

    @property
    def is_base_away(self) -> bool:
        """Whether tensors of the base lie in host memory."""
        return bool(self._away)

    def send_base_away(self, names: Iterable[str], home: torch.device | None = None) -> None:
        """Put these of the base's tensors into host memory, until something needs them; they return to `home`."""
        for name in names:
            base = self.base_tensor(name)
            is_there = name in self._away or not has_own_memory(base)
            if home is not None or not is_there:
                self._away[name] = home or base.device
                base.data = base.data if is_there else to_host(base.data)

    def leave_out(self, names: Iterable[str], home: torch.device) -> None:
        """Put these of the base's parameters into host memory, as plain attributes, which no engine takes over."""
        for name in names:
            owner, attribute = self._place_of(name)
            if attribute in owner._parameters:
                owner.__dict__[attribute] = owner._parameters.pop(attribute)
                self.left_out.append(name)
                self.send_base_away([name], home)

    def take_in(self) -> None:
        """Undo `leave_out` and `send_base_away`."""
        self.bring_base_back()
        while self.left_out:
            owner, attribute = self._place_of(self.left_out.pop())
            owner._parameters[attribute] = owner.__dict__.pop(attribute)

    def _place_of(self, name: str) -> tuple[nn.Module, str]:
        path, _, attribute = name.rpartition(".")
        return self.base_layer.get_submodule(path), attribute

    def bring_base_back(self) -> None:
        """Undo `send_base_away`."""
        for name, device in list(self._away.items()):
            base = self.base_tensor(name)
            base.data = to_device(base.data, device)
            self._away.pop(name, None)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        self.bring_base_back()  # `fn` may move the model elsewhere
        for name in self.left_out:
            base = self.base_tensor(name)
            base.data = fn(base.data)
        return super()._apply(fn, recurse)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in host memory, from where it is fast to fetch."""
    host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
    return host.copy_(tensor)


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on a device."""
    return tensor.to(device)


class BaseOnHost:
    """Puts the tensors of a model's base that its one adapter has copies of into host memory while that is trained.

    Args:
        model: The base model with one adapter in it.
        base_copies: `"host"`: before each forward pass in training. `"device"`: never. `"auto"`: not if something has
            used the base since the last one, as DPO's reference does, for which they would go to and fro.
    """

    def __init__(self, model: nn.Module, base_copies: str):
        self._is_auto = base_copies == "auto"
        self._is_first = True
        # nn.DataParallel, for several devices of one process, wants all parameters on one of them
        is_data_parallel = world_size() == 1 and torch.cuda.device_count() > 1
        stays = base_copies == "device" or engine_of(model) not in (None, "FSDP2")
        self.copied = [] if stays or (is_data_parallel and self._is_auto) else list(_copied_alone(model))
        large = [(m, [n for n in names if m.base_tensor(n).dim() > 1]) for m, names in self.copied]
        self._modules = [(module, names) for module, names in large if names]

    @classmethod
    def of(cls, tuner: Any) -> Self:
        """That of a tuner, as its adapter's config has it."""
        if tuner._base_on_host is None:
            wanted = [getattr(config, "base_copies", "device") for config in tuner.peft_config.values()]
            tuner._base_on_host = cls(tuner.model, wanted[0] if len(wanted) == 1 else "device")
        return tuner._base_on_host

    def on_train_mode(self, model: nn.Module) -> None:
        """To be called when the model is put into training mode; a compiled one does not say when it computes."""
        # DDP, which may be put around the model next, takes parameters of one kind of device
        if self._is_due() and (world_size() == 1 or ddp_around(model)):
            self._send_away()

    def before_forward(self) -> None:
        """To be called before each forward pass in training."""
        if self._is_due():
            self._send_away()
        for module, _ in self._modules[:1]:
            module.was_base_used = False

    def _is_due(self) -> bool:
        """Whether the base is here and, with `"auto"`, nothing has used it since the last forward pass."""
        if not self._modules:
            return False
        first, names = self._modules[0]
        self._is_first &= not first.is_base_away
        is_needed = self._is_auto and first.was_base_used and not self._is_first
        return has_own_memory(first.base_tensor(names[0])) and not (is_needed or first.is_base_away)

    def _send_away(self) -> None:
        self._is_first = False
        for module, names in self._modules:
            module.send_base_away(names)


def leave_base_out(tuner: Any, home: torch.device, dtype: torch.dtype | None) -> None:
    """See `leave_base_out_of_units`."""
    for module, names in BaseOnHost.of(tuner).copied:
        kind, tensors = type(module.base_layer), {name: module.base_tensor(name) for name in names}
        if kind not in DIRECT or "forward" in module.base_layer.__dict__:  # functional_call would register it again
            continue
        if dtype is not None:  # a linear module computes in it by autocast, a norm only if FSDP2 casts its parameters
            tensors = {n: t for n, t in tensors.items() if t.dtype == dtype or t.dim() > 1}
        module.leave_out(tensors, home)


def _copied_alone(model: nn.Module) -> Iterator[tuple[HostedBase, list[str]]]:
    """The modules with the base's tensors that an adapter has copies of, each used there alone and whole."""
    places = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    places[id(next(model.parameters(), None))] += 1  # code asks the first for the model's device
    for module in model.modules():
        if isinstance(module, HostedBase):
            tensors = {name: module.base_tensor(name) for name in module.copied_names()}
            alone = [n for n, t in tensors.items() if n in module.left_out or places[id(t)] == 1]
            if names := [n for n in alone if not hasattr(tensors[n], "device_mesh")]:  # what FSDP2 shards stays
                yield module, names
