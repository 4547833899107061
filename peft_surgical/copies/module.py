"""`TunedModule`: a module whose chosen tensors have one trained copy per adapter.

The base module keeps its weights. In forward it is represented by a *twin*: a shallow copy of the module object that
shares everything with it (hooks, buffers, settings, children) except the tuned tensors, which are the active
adapter's. Nothing is swapped in and out, so several threads may run the module at once, and exceptions change nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, MutableMapping, Sequence
from typing import Any, cast

import torch
from peft.tuners.tuners_utils import BaseTunerLayer, check_adapters_to_merge
from torch import nn

from peft_surgical.copies.columns import ColumnTensors, column_output
from peft_surgical.copies.compute import FunctionalModule, KeptTwin, direct_output, run_by_rows, twin, unreadable
from peft_surgical.copies.host import HostedBase
from peft_surgical.copies.tensors import KeptTensors, TunedNormTensors, TunedTensors
from peft_surgical.distributed import check_whole
from peft_surgical.names import SURGICAL, CopyName, base_path


class TunedModule(HostedBase, BaseTunerLayer):
    """Wraps a module and gives each adapter its own copy of the module's chosen parameters.

    With one active adapter the module computes with that adapter's copies; with several, with
    `base + sum(copy - base)`; with none, or none that tunes this module, with the base's own tensors.

    Example:

        >>> layer = TunedModule(nn.Linear(2, 2), "a", ["weight", "bias"])
        >>> x = torch.ones(1, 2)
        >>> torch.equal(layer(x), layer.base_layer(x))
        True
        >>> sorted(name for name, p in layer.named_parameters() if p.requires_grad and "surgical" in name)
        ['surgical_params.a.bias', 'surgical_params.a.weight']
    """

    adapter_layer_names: tuple[str, ...] = (SURGICAL,)
    other_param_names: tuple[str, ...] = ()
    is_in_place = False  # whether the tuned module holds this one as a child, instead of being wrapped
    by_rows: Sequence[bool] = ()  # not empty while the rows of a batch belong to several adapters
    base_layer: nn.Module

    def __init__(self, base_layer: nn.Module, adapter_name: str, names: Sequence[str], **options: Any):
        super().__init__()
        self._set_base_layer(base_layer)
        setattr(self, self.adapter_layer_names[0], nn.ModuleDict())
        self._active_adapter, self._disable_adapters = [adapter_name], False
        self.merged_adapters: list[str] = []
        self._originals: dict[str, torch.Tensor] = {}  # the base's own values while an adapter is merged
        self.untied: dict[str, nn.Parameter] = {}  # the base's parameters that others use too: no merge changes them
        self.tied: set[str] = set()  # others that are in several places, in all of which each adapter has copies
        self._kept, self._kept_twin = KeptTensors(), KeptTwin()
        self.in_features, self.out_features = (getattr(base_layer, f"{side}_features", None) for side in ("in", "out"))
        self.update_layer(adapter_name, names, **options)
        self.train(base_layer.training)

    def _set_base_layer(self, base_layer: nn.Module) -> None:
        self.base_layer = base_layer

    @property
    def tuned(self) -> MutableMapping[str, TunedTensors]:
        """The copies by adapter."""
        return cast(MutableMapping[str, TunedTensors], getattr(self, self.adapter_layer_names[0]))

    def update_layer(
        self,
        adapter_name: str,
        names: Sequence[str],
        *,
        init_weights: bool = True,
        inference_mode: bool = False,
        shared: dict[int, nn.Parameter] | None = None,
        untrained: Container[str] = (),
        columns: Sequence[int] | None = None,
    ) -> None:
        """Add an adapter, or start an existing one afresh, from the base's own values (also while one is merged).

        Args:
            adapter_name: The adapter.
            names: The tensors to copy, by their name in the module.
            init_weights: Whether the copies start as the base's values. False adds noise, for tests.
            inference_mode: Whether the copies stay frozen.
            shared: The adapter's copies so far, by `id` of the base's parameter: what is tied there stays tied.
            untrained: The parameters that are copied as buffers are, and not trained.
            columns: Of a linear module: the input columns of its weight that are copied, instead of all.
        """
        self.bring_base_back()
        shared = {} if shared is None else shared
        copies: dict[str, torch.Tensor] = {}
        for name in names:
            base = self.base_tensor(name)
            value = self._originals.get(name, base).detach()
            if isinstance(base, nn.Parameter) and name not in untrained:
                if (key := self.identity(name)) not in shared:
                    value = value.clone() if init_weights else value + 0.1 * torch.randn_like(value)
                    shared[key] = nn.Parameter(value)
                copies[name] = shared[key]
            else:
                copies[name] = value.clone()
        if columns is None:
            self.put(adapter_name, copies)
        else:
            self.tuned[adapter_name] = ColumnTensors(self.base_layer, copies["weight"], columns, self.original)
        self.tuned[adapter_name].requires_grad_(adapter_name in self.active_adapters and not inference_mode)

    def put(self, adapter_name: str, copies: Mapping[str, torch.Tensor]) -> None:
        """Make these tensors, by their name in the module, an adapter's copies."""
        entry_cls = TunedNormTensors if isinstance(self.base_layer, nn.LayerNorm) else TunedTensors
        self.tuned[adapter_name] = entry_cls(copies).train(self.training)

    def copy_name(self, path: str, name: str) -> CopyName:
        """What an adapter's copy of a tensor of this module, at a path in the model, is called."""
        return CopyName(base_path(path), name, self.adapter_layer_names[0], self.is_in_place)

    # ---- computing

    def forward(self, *args: Any, adapter_names: Sequence[str] | None = None, **kwargs: Any) -> Any:
        if adapter_names is None and len(args) == 1 and not kwargs:
            out = self._direct_output(args[0])
            if out is not None:
                return out
        if self.disable_adapters and self.merged:
            self.unmerge()
        if adapter_names is not None and not self.disable_adapters:
            return self._forward_by_rows(adapter_names, args, kwargs)
        return self.module_in_use()(*args, **kwargs)

    def _direct_output(self, x: Any) -> Any:
        """The output with the copies of the one active adapter, if the call takes no more."""
        active = self._active_adapter
        if self._disable_adapters or self.merged_adapters or len(active) != 1:
            return None
        modules: Any = self._modules
        copies = modules[self.adapter_layer_names[0]]._modules.get(active[0])
        if isinstance(copies, ColumnTensors):
            return column_output(modules.get("base_layer"), copies, x)
        return direct_output(modules.get("base_layer"), copies, x, self._kept_twin)

    def _forward_by_rows(self, adapter_names: Sequence[str], args: tuple, kwargs: dict[str, Any]) -> Any:
        if self.merged:
            text = "Cannot pass `adapter_names` when there are merged adapters, please call `unmerge_adapter` first."
            raise ValueError(text)
        if not any(name in self.tuned for name in adapter_names):
            return self.base_in_use()(*args, **kwargs)
        return run_by_rows(self.base_in_use(), lambda name: self.module_for([name]), adapter_names, args, kwargs)

    def module_in_use(self) -> Any:
        """What computes at present: the active adapters' twin, or the base."""
        if self.by_rows and not self.disable_adapters:
            return unreadable(self.base_layer, {name: self.base_tensor(name) for name in self.names_of(self.tuned)})
        return self.base_in_use() if self.disable_adapters or self.merged else self.module_for(self.active_adapters)

    def module_for(self, adapters: Iterable[str]) -> Callable[..., Any]:
        """What computes when these adapters are active; the base for those that do not tune this module."""
        present = [name for name in adapters if name in self.tuned]
        if not present:
            return self.base_in_use()
        tensors = self.tensors_of(present)
        if self._needs_functional_call() and not self.left_out:
            return FunctionalModule(self.base_layer, tensors)
        return twin(self.base_layer, tensors)

    def _needs_functional_call(self) -> bool:
        # torch.compile traces functional_call but not the making of a twin; a forward that was replaced on the
        # instance is bound to the base itself; an RNN keeps a second list of its weights
        return torch.compiler.is_compiling() or any(
            "forward" in m.__dict__ or isinstance(m, nn.RNNBase) for m in self.base_layer.modules()
        )

    def tensors_of(self, adapters: Sequence[str]) -> dict[str, torch.Tensor]:
        """What the module computes with when these adapters are active, in the base's dtype."""
        entries = [self.tuned[adapter] for adapter in adapters]
        if len(entries) > 1:  # their sum is computed with more digits than copies at rest have
            entries = [entry.wake() for entry in entries]
        copies = {name: [entry[name] for entry in entries if name in entry] for name in self.names_of(adapters)}
        if torch.compiler.is_compiling() or any(isinstance(entry, ColumnTensors) for entry in entries):
            return self._combine(copies)  # nothing can be kept of columns
        return self._kept.get(copies, [self._originals.get(n, self.base_tensor(n)) for n in copies], self._combine)

    def copied_names(self) -> list[str]:
        return self.names_of(a for a in self.tuned if not isinstance(self.tuned[a], ColumnTensors))

    def names_of(self, adapters: Iterable[str]) -> list[str]:
        """The tensors of which these adapters have copies."""
        return list(dict.fromkeys(name for a in adapters for name in self.tuned[a].names))

    def _combine(self, copies: Mapping[str, Sequence[torch.Tensor]]) -> dict[str, torch.Tensor]:
        combined = {}
        for name, tensors in copies.items():
            if len(tensors) == 1 or not tensors[-1].is_floating_point():
                combined[name] = tensors[-1].to(self._dtype_of(name))
            else:
                base = self.original(name)
                start = base.detach().to(torch.promote_types(base.dtype, torch.float32))
                combined[name] = (start + sum(t.to(start.dtype) - start for t in tensors)).to(base.dtype)
        return combined

    def original(self, name: str) -> torch.Tensor:
        """The base's own tensor, also while an adapter is merged into the base."""
        self.bring_base_back()
        return self._originals.get(name, self.base_tensor(name))

    def base_tensor(self, name: str) -> torch.Tensor:
        """The tensor that the base has at present; while an adapter is merged, with the adapter's values."""
        path, _, attribute = name.rpartition(".")
        return getattr(self.base_layer.get_submodule(path), attribute)

    def identity(self, name: str) -> int:
        """What is the same for tensors that are tied in the base, and for no others."""
        return id(self.base_tensor(name))

    def _dtype_of(self, name: str) -> torch.dtype:
        return self._originals.get(name, self.base_tensor(name)).dtype

    # parents may read `module.weight`, or anything else, instead of calling the module

    weight = property(lambda self: self.module_in_use().weight)
    bias = property(lambda self: self.module_in_use().bias)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            # what accelerate and DeepSpeed hang on a module belongs to it alone
            alone = ("__", "_hf_", "_old_", "_z3_", "ds_")
            if name == "base_layer" or "_modules" not in self.__dict__ or name.startswith(alone):
                raise
        base = self.base_layer
        may_differ = hasattr(type(base), name) or name in {*base._modules, *self.names_of(self.tuned)}
        return getattr(self.module_in_use() if may_differ else base, name)  # many ask every module for their own marks

    # ---- merging

    @torch.no_grad()
    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Put the values of these adapters, or else the active ones, into the base, and keep its own for `unmerge`.

        With `safe_merge` nothing is merged if a value is NaN or infinite.
        """
        if not (names := [name for name in check_adapters_to_merge(self, adapter_names) if name in self.tuned]):
            return
        check_whole(self.tuned[names[0]], "merging")
        self.bring_base_back()
        # not the adapter's own tensors: who writes to the merged base must not change the adapter
        merged = {name: t.clone() for name, t in self.tensors_of([*self.merged_adapters, *names]).items()}
        if safe_merge and (broken := [name for name, t in merged.items() if not torch.isfinite(t).all()]):
            raise ValueError(
                f"NaNs detected in the merged weights. The adapter {names[0]} seems to be broken: "
                f"{broken[0]} of {type(self.base_layer).__name__} has values that are not finite."
            )
        try:
            self._put_into_base(merged)
            self.merged_adapters.extend(names)
        except BaseException:  # an interrupt: merged in part, the module would answer as neither
            self.unmerge()
            raise

    def _put_into_base(self, merged: Mapping[str, torch.Tensor]) -> None:
        for name, value in merged.items():
            base: Any = self.base_tensor(name)
            if name in self.tied and hasattr(base, "_original") and not torch.equal(base.data, value):
                self.untied[name] = base  # another of its places was merged, with other values
            base._original = getattr(base, "_original", base.data)
            self._originals.setdefault(name, base._original)
            if base is self.untied.get(name):
                self._replace_in_base(name, nn.Parameter(value, requires_grad=False))
            else:
                base.data = value

    def _replace_in_base(self, name: str, parameter: nn.Parameter) -> None:
        path, _, attribute = name.rpartition(".")
        setattr(self.base_layer.get_submodule(path), attribute, parameter)

    def unmerge(self) -> None:
        """Give the base its own values back, bit for bit."""
        for name, value in self._originals.items():
            if name in self.untied:
                self._replace_in_base(name, self.untied[name])
            base: Any = self.base_tensor(name)
            base.data = value
            base.__dict__.pop("_original", None)
        self._originals, self.merged_adapters = {}, []

    # ---- loading

    def _move_adapter_to_device_of_base_layer(self, adapter_name: str, device: torch.device | None = None) -> None:
        """Move an adapter to the base's device. PEFT's own version would also cast it to the base's dtype."""
        if adapter_name not in self.tuned:
            return
        for name in self.tuned[adapter_name].names:
            target, tensor = device or self.base_tensor(name).device, self.tuned[adapter_name][name]
            if tensor.device.type != "meta" and tensor.device != target:
                tensor.data = tensor.data.to(target)

    def __repr__(self) -> str:
        return "surgical." + super().__repr__()
