"""Parameters that the base model uses in several places, of which an adapter tunes only some.

An adapter's copy stands in one place, so it unties them: the embeddings may be tuned and the head that shares their
weights not. Merging keeps to that, and the merged model's config says so.
"""

from __future__ import annotations

import collections
import logging
from typing import Any, cast

from peft.tuners.lora.layer import LoraLayer
from torch import nn

from peft_surgical.copies.module import TunedModule
from peft_surgical.copies.select import token_embeddings


logger = logging.getLogger(__name__)


def note_untied(model: nn.Module) -> None:
    """Tell each adapted module which of its base's parameters are used by others that are not tuned with it."""
    tuned = [module for module in model.modules() if isinstance(module, TunedModule)]
    places = collections.Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    owners = collections.Counter(module.identity(name) for module in tuned for name in _names(module))
    for module in tuned:
        if not module.merged:
            shared = {name: places[module.identity(name)] for name in _names(module)}
            module.untied = {
                name: cast(nn.Parameter, module.base_tensor(name))
                for name, count in shared.items()
                if count > owners[module.identity(name)]
            }
    layers: list[Any] = [m for m in model.modules() if isinstance(m, LoraLayer) and hasattr(m, "untied")]
    for lora in layers:
        if not lora.merged:
            parameters = lora.get_base_layer().named_parameters(recurse=False)
            lora.untied = {name: p for name, p in parameters if places[id(p)] > 1}  # what LoRA adds is never tied


def forget_originals(model: nn.Module) -> None:
    """Let go of the values that were kept aside for undoing a merge."""
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.__dict__.pop("_original", None)


def admit_untied_embeddings(model: Any) -> None:
    """Make a merged model's config tell that its head has other weights than its embeddings, if that is so now."""
    if not hasattr(getattr(model, "config", None), "get_text_config"):
        return
    config = model.config.get_text_config()
    embeddings, head = (getattr(module, "weight", None) for module in token_embeddings(model))
    if embeddings is None or head is None or not getattr(config, "tie_word_embeddings", False):
        return
    # the head may be tied to other embeddings than the model's first: those of its decoder
    is_tied = sum(p is head for _, p in model.named_parameters(remove_duplicate=False)) > 1
    if embeddings.data_ptr() != head.data_ptr() and not is_tied:
        logger.info("The head and the embeddings no longer share their weights: tie_word_embeddings is set to False.")
        config.tie_word_embeddings = model.config.tie_word_embeddings = False


def _names(module: TunedModule) -> set[str]:
    return {name for copies in module.tuned.values() for name in copies.names}
