"""What an adapter has whole: the task's own head, of its own size on one model, and embeddings saved along."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from peft import TaskType
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from torch import nn

from peft_surgical.copies.select import bottom, matches_any, own_tensor_names, token_embeddings
from peft_surgical.files.adapter import touched_names
from peft_surgical.files.base import base_tensors
from peft_surgical.files.safetensors_io import TensorFile
from peft_surgical.layers import find_stacks, unwrap
from peft_surgical.names import PREFIX, base_path, without_wrappers


TASKS_WITH_HEAD = (TaskType.SEQ_CLS, TaskType.TOKEN_CLS, TaskType.QUESTION_ANS)
_LABEL_SETTINGS = ("num_labels", "id2label", "label2id", "problem_type")


def head_names(model: nn.Module, task_type: str | None) -> list[str]:
    """The names of the modules that make up the head of a transformers model for classification or extraction.

    That is whatever lies beside the pretrained model and holds parameters, e.g. `pre_classifier` and `classifier` in
    DistilBERT; of lists the modules in them. They are new for each task, so they are trained in full and saved with
    the adapter. A language model's head belongs to the pretrained model and is not listed.
    """
    body = _pretrained_part(model) if task_type in TASKS_WITH_HEAD else None
    if body is None:
        return []
    names: list[str] = []
    for name, child in model.named_children():
        if name == body or not any(True for _ in child.parameters()):
            continue
        names += [f"{name}.{i}" for i in range(len(child))] if isinstance(child, nn.ModuleList) else [name]
    # PEFT finds modules by the end of their path, and copies modules alone
    in_body = [path for path, _ in model.named_modules() if path.partition(".")[0] == body]
    alike = {name for name in names if any(path.endswith(name) for path in in_body)}
    for name in [*(name for name, _ in model.named_parameters(recurse=False)), *sorted(alike)]:
        why = "a part of the pretrained model has that name" if name in alike else "it is a parameter by itself"
        warnings.warn(f"{name!r} of {type(model).__name__}'s head is not trained: {why}.", stacklevel=2)
    return [name for name in names if name not in alike]


def saved_modules(model: nn.Module, names: Sequence[str] | None) -> list[nn.Module]:
    """The modules that PEFT's `modules_to_save` means by these names; a `ValueError` if one of them lies in another,
    for PEFT would train neither rightly."""
    found = {path: module for path, module in model.named_modules() if path.endswith(tuple(names or ()))}
    for path in found:
        above = {path[: dot.start()]: model.get_submodule(path[: dot.start()]) for dot in re.finditer(r"\.", path)}
        if outer := next((p for p, m in above.items() if p in found or isinstance(m, ModulesToSaveWrapper)), None):
            raise ValueError(
                f"modules_to_save={names!r}: a name means all modules whose paths end with it, here {path!r} and "
                f"{outer!r} around it, which cannot both be saved. Name more of the path of one, or its parts."
            )
    return list(found.values())


def _pretrained_part(model: nn.Module) -> str | None:
    """The name of the child that is the bare model: by its usual name, or because all layers are in it."""
    usual = getattr(model, "base_model_prefix", "")
    if usual and isinstance(model._modules.get(usual), nn.Module):
        return usual
    holders = {stack.path.partition(".")[0] for stack in find_stacks(model).values()}
    return holders.pop() if len(holders) == 1 and hasattr(model, "base_model_prefix") else None


def label_settings(model: nn.Module) -> dict[str, Any]:
    """Number and names of the labels of a model, as plain data; empty if it has none."""
    config = getattr(model, "config", None)
    if not hasattr(config, "num_labels"):
        return {}
    return {name: copy.deepcopy(getattr(config, name, None)) for name in _LABEL_SETTINGS}


def apply_label_settings(model: nn.Module, settings: dict[str, Any]) -> None:
    """Make the model's config, and the number that its loss uses, tell of these labels."""
    config: Any = getattr(model, "config", None)
    if not settings or not hasattr(config, "num_labels"):
        return
    names = settings.get("id2label")
    if names:
        config.id2label = {int(index): name for index, name in names.items()}  # JSON makes the keys text
        config.label2id = settings.get("label2id") or {name: index for index, name in config.id2label.items()}
    else:
        config.num_labels = settings["num_labels"]
    config.problem_type = settings.get("problem_type")
    if "num_labels" in model.__dict__:
        model.num_labels = settings["num_labels"]


def head_shapes(
    model: nn.Module, modules_to_save: Sequence[str], num_labels: int, num_labels_of_base: int
) -> dict[str, torch.Size]:
    """The shapes of the tensors that an adapter's head will have, for as many labels, by their names in the model."""
    shapes: dict[str, torch.Size] = {}
    heads: list[str] = []
    for path, module in model.named_modules():
        inside_another = any(path.startswith(f"{head}.") for head in heads)
        if not inside_another and any(path.endswith(name) for name in modules_to_save):
            heads.append(path)
            module = module.original_module if isinstance(module, ModulesToSaveWrapper) else module
            output = _output_module(module, num_labels_of_base)
            for name, tensor in module.state_dict().items():
                shape = tensor.shape
                if num_labels != num_labels_of_base and output is not None and name.rpartition(".")[0] == output:
                    shape = torch.Size([num_labels, *shape[1:]])
                shapes[f"{path}.{name}"] = shape
    return shapes


def resize_heads(model: nn.Module, adapter_name: str, num_labels: int, num_labels_of_base: int) -> None:
    """Give an adapter's copy of the head as many outputs as its task has labels."""
    if num_labels == num_labels_of_base:
        return
    resized = False
    for wrapper in model.modules():
        if isinstance(wrapper, ModulesToSaveWrapper) and adapter_name in wrapper.modules_to_save:
            head: Any = wrapper.modules_to_save[adapter_name]
            name = _output_module(head, num_labels_of_base)
            if name is None:
                continue
            old = head.get_submodule(name)
            new = nn.Linear(old.in_features, num_labels, bias=old.bias is not None)
            new = new.to(old.weight.device, old.weight.dtype).train(old.training)
            initialise: Any = getattr(model, "_init_weights", lambda module: None)
            initialise(new)
            for parameter in new.parameters():
                parameter.requires_grad_(old.weight.requires_grad)
            if name:
                head.set_submodule(name, new)
            else:
                wrapper.modules_to_save[adapter_name] = new
            resized = True
    if not resized:
        raise ValueError(
            f"Adapter {adapter_name!r} has {num_labels} labels and the base model {num_labels_of_base}, but no linear "
            "module with one output per label was found in the head. Load the base model with "
            f"num_labels={num_labels}."
        )


def _output_module(head: nn.Module, num_labels: int) -> str | None:
    names = [n for n, m in head.named_modules() if isinstance(m, nn.Linear) and m.out_features == num_labels]
    return names[-1] if names else None


# ---- embeddings of an adapter's own


TRAINED_TOKENS = ".token_adapter.trainable_tokens_delta"
"""How PEFT calls the embeddings of the tokens that `trainable_token_indices` names."""
_WRAPPERS = ("", "base_layer.", "original_module.", "modules_to_save.", "token_adapter.base_layer.")


def trained_rows(model: nn.Module, config: Any) -> dict[str, Sequence[int]]:
    """The tokens that `trainable_token_indices` names, by the names in the base of the embeddings that hold them."""
    indices = getattr(config, "trainable_token_indices", None)
    named = indices if isinstance(indices, Mapping) else {"": indices} if indices is not None else {}
    found = {_embeddings_name(model, end): tokens for end, tokens in named.items()}
    return {name: tokens for name, tokens in found.items() if name is not None}


def _embeddings_name(model: nn.Module, end: str = "") -> str | None:
    """The name of the weights of the module whose path ends so; if none is given, of the embeddings of tokens."""
    embeddings = None if end else token_embeddings(model)[0]
    for path, module in model.named_modules():
        if (path == end or path.endswith(f".{end}")) if end else module is embeddings:
            return f"{without_wrappers(path)}.weight"
    return None


def check_trained_rows(model: nn.Module, config: Any, base: Mapping[str, torch.Tensor]) -> None:
    """Check that the rows that are trained by themselves are trained wherever the weights are used, and only so."""
    rows, embeddings = trained_rows(model, config), _embeddings_name(model)
    for name in rows:
        places = [other for other, tensor in base.items() if tensor is base[name]]
        if whole := [place for place in places if matches_any(place, config.modules_to_save)]:
            raise ValueError(
                f"trainable_token_indices trains rows of {name}, and modules_to_save={config.modules_to_save!r} all "
                f"of {whole[0]}, which is the same tensor: name it in one of the two."
            )
        if embeddings in places and embeddings not in rows:
            raise ValueError(
                f"trainable_token_indices={config.trainable_token_indices!r} trains rows of {name} alone, which "
                f"shares its weights with {embeddings}: name the tokens as a list, and both are trained."
            )


def embedding_tensors(model: nn.Module) -> dict[str, str]:
    """The paths of the embeddings, which PEFT saves on demand or if resized, by their tensors' names in a file."""
    found: dict[str, str] = {}
    for embedding in token_embeddings(model):
        for path, module in model.named_modules():
            if module is embedding and module is not None:
                path = without_wrappers(path).removeprefix(PREFIX)
                inner = bottom(module.original_module if isinstance(module, AuxiliaryTrainingWrapper) else module)
                for name in own_tensor_names(inner):
                    for wrapper in _WRAPPERS:  # of an adapter, if they are tuned themselves
                        found[f"{PREFIX}{path}.{wrapper}{name}"] = path
    return found


def changed_embeddings(
    file: TensorFile, model: nn.Module, base: Mapping[str, torch.Tensor], heads: Sequence[str]
) -> list[str]:
    """The paths of the embeddings, but for `heads`, that PEFT saved along and that have other values than the base's.

    The base may use such weights in other places too, of which PEFT has saved none: an encoder's and a decoder's. They
    are the adapter's in these as well, so the file has them by these names from now on.
    """
    found: dict[str, None] = {}
    for key in embedding_tensors(model):
        own = base.get(key.removeprefix(PREFIX))
        if own is None or key not in file or matches_any(base_path(key), heads) or is_same(file[key], own):
            continue
        places = [name for name, tensor in base.items() if tensor is own and name not in touched_names(file)]
        modules = [bottom(model.get_submodule(name.rpartition(".")[0])) for name in places]
        if len(set(map(id, modules))) < len(modules):
            raise ValueError(
                f"{key!r} has other values than the base's {' and '.join(places)}, which are one module that no "
                "adapter can have for itself. Copy the values into the base before the adapter is loaded."
            )
        for name in places:
            found[name.rpartition(".")[0]] = None
            if (other := f"{PREFIX}{name}") not in file:
                file.also_as(key, other)
    return list(found)


def take_out_own(
    state: dict[str, torch.Tensor], model: nn.Module, config: Any, base: Mapping[str, torch.Tensor] | None = None
) -> None:
    """Take the embeddings that are not the adapter's, but the base's own, out of its state, once that is checked."""
    of_base = embedding_tensors(model)
    names = [n for n in state if n in of_base and not matches_any(base_path(n), config.modules_to_save)]
    check_own({name: state.pop(name) for name in names}, model, config, base)


def check_own(
    tensors: Mapping[str, torch.Tensor], model: nn.Module, config: Any, base: Mapping[str, torch.Tensor] | None = None
) -> None:
    """Check that tensors, by their names in a file, are the base's own, which loading never changes.

    Those for which the adapter has its own count for nothing: of `modules_to_save`, and of the rows that it trains.
    """
    base = (base_tensors(unwrap(model)) if tensors else {}) if base is None else base
    rows = trained_rows(unwrap(model), config) if tensors else {}
    trained = {id(base[name]): tokens for name, tokens in rows.items()}  # also of a head that shares the weights
    for name, tensor in tensors.items():
        path, is_rows, _ = name.partition(TRAINED_TOKENS)
        in_base = base_path(f"{path}.weight" if is_rows else name)
        own = base.get(in_base)
        tokens = trained.get(id(own))
        if matches_any(in_base, config.modules_to_save) or (is_rows and tokens):
            continue
        if tokens and own is not None and tensor.shape == own.shape:
            untrained = [*set(range(len(own))).difference(tokens)]
            tensor, own = tensor[untrained], own[untrained]
        if own is None or not is_same(tensor, own):
            raise ValueError(
                f"{name!r} belongs to the base, where it has other values, and loading never changes the base. Name "
                "its module in modules_to_save (or extra_modules), or the rows in trainable_token_indices, to make "
                "it the adapter's."
            )


def is_same(tensor: torch.Tensor, own: torch.Tensor) -> bool:
    """Whether a loaded tensor has the values of the base's own, in the base's dtype."""
    return own.is_meta or (tensor.shape == own.shape and torch.equal(tensor.to(own.device, own.dtype), own.detach()))
