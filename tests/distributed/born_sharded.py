"""Adapt and load models that ZeRO-3 shards as they are made: `born_sharded.py FOLDER`, see the test."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from adapters import make_config
from peft import PeftModel, get_peft_model
from transformers import AutoModelForSequenceClassification

from distributed.cases import METHODS, digest, logits, make_optimizer, samples
from peft_surgical import rank_layers


def main(folder: Path) -> None:
    accelerator = Accelerator()
    settings = accelerator.state.deepspeed_plugin.deepspeed_config
    settings["train_micro_batch_size_per_gpu"] = 2
    settings["zero_optimization"]["stage3_param_persistence_threshold"] = 0

    def load() -> Any:
        return AutoModelForSequenceClassification.from_pretrained(folder / "base")

    found: dict[str, Any] = {"held": sum(p.numel() for p in load().parameters())}
    try:
        rank_layers(load(), samples(), progress=False)
    except ValueError as error:
        found["rank"] = str(error)
    for case in METHODS[:2]:
        adapted = get_peft_model(load(), make_config(case.method, "bert", [1, 2]))
        copies = {name: p for name, p in adapted.named_parameters() if p.requires_grad and "lora_A" not in name}
        loaded = PeftModel.from_pretrained(load(), folder / case.name, is_trainable=True)
        prepared, _ = accelerator.prepare(loaded, make_optimizer(loaded))
        outputs = logits(prepared)
        found[case.name] = {
            "copies": digest(copies[name] for name in sorted(copies)),
            "base": adapted.peft_config["default"].base,
        }
        if accelerator.is_main_process:
            torch.save(outputs, folder / f"{case.name}.pt")
    if accelerator.is_main_process:
        (folder / "found.json").write_text(json.dumps(found))
    accelerator.wait_for_everyone()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
