"""The processes of a distributed run, and what a model has to be like before and after their engine takes it over."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist
from peft.utils.integrations import gather_params_ctx
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from peft_surgical.layers import find_stacks, unwrap


if TYPE_CHECKING:
    from accelerate import PartialState

T = TypeVar("T")

_ENGINES = {  # by the class that the engine gives a module, or wraps it in
    "DistributedDataParallel": "DDP",
    "FSDPModule": "FSDP2",
    "FullyShardedDataParallel": "FSDP1",
    "DeepSpeedEngine": "DeepSpeed",
}


# ---- processes. torch's own group and not accelerate's state: whoever starts a group by hand has no such state


def world_size() -> int:
    """The number of processes."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """The number of this process, from 0."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def gather(value: T) -> list[T]:
    """What each process has, in their order. For small things."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def all_reduce(tensor: Tensor) -> Tensor:
    """The sum over processes, written to the tensor itself."""
    if world_size() > 1:
        if dist.get_backend() == "nccl" and not tensor.is_cuda:
            tensor.copy_(all_reduce(tensor.to(torch.device("cuda", torch.cuda.current_device()))))
        else:
            dist.all_reduce(tensor)
    return tensor


def on_all_ranks(action: Callable[[], object]) -> None:
    """Do something; the error of any process is raised on all of them, so that none waits for one that gave up.

    Raises:
        Exception: The error of this process; in the others a `RuntimeError` that says what it was.
    """
    error = None
    try:
        action()
    except Exception as caught:  # noqa: BLE001  the other processes must hear of it
        error = caught
    messages = gather(None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    for number, message in enumerate(messages):
        if message is not None:
            raise RuntimeError(f"Process {number} failed. {message}")


def this_process() -> PartialState:
    """This process among those of a launch: whether it is the first, how many there are, and the device to run on.

    The device is the CPU where there is no accelerator, or under `accelerate launch --cpu`. Starts the process group.
    """
    from accelerate import PartialState
    from accelerate.utils import parse_flag_from_env

    on_cpu = parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.accelerator.is_available()
    return PartialState(cpu=on_cpu)


# ---- engines


def engine_of(model: nn.Module) -> str | None:
    """The engine of distributed training that a model was prepared for, or None.

    What DDP and ZeRO-1/2 hold of a model cannot be told from the model inside their wrappers.
    """
    for module in model.modules():
        if "ds_id" in module.__dict__:
            return "DeepSpeed"
        for cls in type(module).__mro__:
            if cls.__name__ in _ENGINES:
                return _ENGINES[cls.__name__]
    return None


def check_not_prepared(model: nn.Module, action: str, *, but_for: str | None = None) -> None:
    """Check that no engine, but for one that does no harm, has taken a model over; `action` is what comes before."""
    engine = engine_of(model)
    if engine not in (None, but_for):
        raise ValueError(
            f"The model is prepared for {engine} already: {action} comes first, "
            "accelerator.prepare(model) or Trainer.train() second."
        )


def check_whole(module: nn.Module, action: str) -> None:
    """Check that a module's parameters are not shards, which FSDP2 or ZeRO-3 makes of them, before an action."""
    if any(hasattr(parameter, "device_mesh") or hasattr(parameter, "ds_id") for parameter in module.parameters()):
        raise ValueError(
            f"The model's weights are sharded, and {action} needs whole ones. Save the adapter, and do it in a "
            "process of its own that loads it."
        )


def ddp_around(model: nn.Module) -> list[DistributedDataParallel]:
    """The wrappers of DDP around a model, also those of trainings before; nothing else shows them to those inside."""
    if world_size() == 1:
        return []
    wrappers = [thing for thing in gc.get_objects() if type(thing) is DistributedDataParallel]
    return [wrapper for wrapper in wrappers if unwrap(wrapper) is unwrap(model)]


def renew_reducer(ddp: DistributedDataParallel) -> None:
    """Let DDP reduce the gradients of what is trainable now. Its reducer is made once, of what was trainable then, and
    would wait for the others' gradients."""
    parameters, are_sparse = ddp._build_params_for_reducer()
    names = ddp._build_debug_param_to_name_mapping(parameters)
    ddp._ddp_init_helper(parameters, are_sparse, names, ddp.static_graph)


def check_same_weights(model: nn.Module) -> None:
    """Check that all processes have the same whole model, by one value of each parameter."""
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        raise ValueError(
            "ZeRO-3 sharded the model when it was made, and its layers are ranked by whole weights. Load the model "
            "before TrainingArguments are made, and with zero3_init_flag: false; or rank in a run of its own."
        )
    if world_size() == 1:
        return
    present = {name: p for name, p in model.named_parameters() if p.numel() and not p.is_meta}
    values = gather({name: p.detach().flatten()[-1].item() for name, p in present.items()})
    for name in present:
        if len({repr(of_process.get(name)) for of_process in values}) > 1:
            raise ValueError(
                f"The processes have different weights: {name!r} is not the same in all of them. Load the weights in "
                "every process (fsdp_cpu_ram_efficient_loading: false), and set the same seed before a head is made."
            )


def whole_weights(model: nn.Module) -> AbstractContextManager[None]:
    """A context in which a model that FSDP1 shards has its whole weights; all processes enter it together."""
    if engine_of(model) != "FSDP1":
        return nullcontext()
    from torch.distributed.fsdp import FullyShardedDataParallel  # not in every build of PyTorch

    return FullyShardedDataParallel.summon_full_params(model, writeback=False)


def whole_tensor(tensor: Tensor) -> AbstractContextManager[None]:
    """A context in which a tensor that ZeRO-3 shards has its whole value; all processes enter it together."""
    is_sharded = isinstance(tensor, nn.Parameter) and hasattr(tensor, "ds_id") and not tensor.numel()
    return gather_params_ctx(cast(nn.Parameter, tensor), None) if is_sharded else nullcontext()


def leave_base_out_of_units(model: Any, device: torch.device, dtype: torch.dtype | None = None) -> None:
    """Keep from FSDP2 the base's own parameters that the one adapter of a model has copies of.

    In its units they would be gathered with the copies at every step, which needs none of them. So they lie in host
    memory, whole in each process, until something needs them. `base_copies="device"` leaves them in.

    Args:
        model: The model, before FSDP2 takes it over.
        device: Where it is going to compute.
        dtype: FSDP2's `MixedPrecisionPolicy.param_dtype`, for which there must be autocast too, as in accelerate.
    """
    leave_out = getattr(getattr(model, "base_model", None), "leave_base_out", None)
    if leave_out is not None:
        leave_out(device, dtype)


def shard_by_layer(accelerator: Any, model: nn.Module) -> None:
    """Let FSDP make a unit of each transformer layer, or of the classes that the launch names.

    Left to themselves, FSDP2 fails on families whose own list of units has the embeddings too, and under Trainer FSDP1
    makes a unit of a trained head, which then fails to be saved. With other engines this does nothing. Call it before
    training. Under FSDP2 the base's own values of what is tuned stay out of the units (`leave_base_out_of_units`).

    Args:
        accelerator: accelerate's `Accelerator`; of a `Trainer`, `trainer.accelerator`.
        model: The model, with or without adapters.

    Raises:
        ValueError: Under FSDP1, the model has no module of a class that the launch names, a unit would have parameters
            of two dtypes, or there are adapters of one of PEFT's own methods, which would lose their tensors.

    Example:

        >>> from accelerate import Accelerator
        >>> shard_by_layer(Accelerator(cpu=True), nn.Linear(2, 2))
    """
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is None:
        return
    version = getattr(plugin, "fsdp_version", 1)
    if not plugin.transformer_cls_names_to_wrap or hasattr(plugin, "_names_are_of_layers"):
        layers = [layer.module for stack in find_stacks(model).values() for layer in stack.layers]
        plugin.transformer_cls_names_to_wrap = list(dict.fromkeys(type(layer).__name__ for layer in layers))
        plugin._names_are_of_layers = True  # of this model, not of the next one
    # not weights that one process loads for all, and those that are sharded on the host cost the device nothing
    is_offloaded = type(plugin.cpu_offload).__name__ == "CPUOffloadPolicy"
    if version == 2 and not (plugin.cpu_ram_efficient_loading or is_offloaded):
        dtype = getattr(plugin.mixed_precision_policy, "param_dtype", None)
        leave_base_out_of_units(model, accelerator.device, dtype)
    if version == 1:
        _check_saved_whole(model)
        from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy  # slow, and not in every build of PyTorch

        classes = {type(module).__name__: type(module) for module in model.modules()}
        if missing := [name for name in plugin.transformer_cls_names_to_wrap if name not in classes]:
            raise ValueError(
                f"fsdp_transformer_layer_cls_to_wrap names {missing[0]!r}, but {type(unwrap(model)).__name__} has no "
                "such module. Leave it out: the classes of the layers are found."
            )
        units = {classes[name] for name in plugin.transformer_cls_names_to_wrap}
        _check_dtypes(model, [module for module in model.modules() if type(module) in units])
        policy = partial(transformer_auto_wrap_policy, transformer_layer_cls=units)
        # one that stays: when training starts, Trainer puts PEFT's in its place, and has no option not to
        stays = {"auto_wrap_policy": property(lambda self: policy, lambda self, other: None)}
        plugin.__class__ = type(type(plugin).__name__, (type(plugin),), stays)


def _check_dtypes(model: nn.Module, units: list[nn.Module]) -> None:
    """Refuse what FSDP1 cannot make one flat tensor of."""
    inside = [{id(parameter) for parameter in unit.parameters()} for unit in units]
    outside = {id(parameter) for parameter in model.parameters()}.difference(*inside)
    for members in [*inside, outside]:
        dtypes = {str(p.dtype).removeprefix("torch.") for p in model.parameters() if id(p) in members}
        if len(dtypes) > 1:
            raise ValueError(
                f"FSDP1 needs one dtype in each unit, and this model has {' and '.join(sorted(dtypes))} in one. Use "
                "FSDP2; or make the adapters with autocast_adapter_dtype=False; or load the base in float32 and set "
                "mixed_precision: bf16."
            )


def _check_saved_whole(model: nn.Module) -> None:
    """Refuse adapters that could not be saved under FSDP1, where a tensor's name is not the path of its module."""
    for name, config in getattr(model, "peft_config", {}).items():
        if not hasattr(config, "format_version"):  # only the configs of this package have it
            raise ValueError(
                f"Adapter {name!r} is a {type(config).__name__} of PEFT's own, which saves files without its tensors "
                "under FSDP1. Use FSDP2 (fsdp_version: 2), or, for LoRA, StratifiedConfig(target_modules=[...])."
            )
