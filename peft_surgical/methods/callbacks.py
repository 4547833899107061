"""`load_best_model_at_end` for adapters that are not called "default"."""

from __future__ import annotations

import os
from typing import Any

from peft import PeftModel, load_peft_weights, set_peft_model_state_dict
from transformers import TrainerCallback


class BestAdapterCallback(TrainerCallback):
    """Loads the best checkpoint's adapters at the end of a `Trainer` run with `load_best_model_at_end=True`.

    PEFT saves an adapter that is not called "default" in a folder of its own, where `Trainer` does not look for it: it
    says that it could not locate the best model, and goes on with the last one.

    Raises:
        FileNotFoundError: At the end of training, if the best checkpoint has no active adapter of the model.

    Example:

        >>> callback = BestAdapterCallback()  # for Trainer(..., callbacks=[callback])
    """

    def on_train_end(self, args, state, control, model=None, **kwargs):
        checkpoint = state.best_model_checkpoint
        if not args.load_best_model_at_end or checkpoint is None:
            return
        peft_model: Any = getattr(model, "module", model)
        if not isinstance(peft_model, PeftModel):
            return
        for name in peft_model.active_adapters:
            folder = checkpoint if name == "default" else os.path.join(checkpoint, name)
            if not os.path.isfile(os.path.join(folder, "adapter_config.json")):
                raise FileNotFoundError(f"The best checkpoint {checkpoint} has no adapter {name!r}.")
            set_peft_model_state_dict(peft_model, load_peft_weights(folder, device="cpu"), adapter_name=name)
