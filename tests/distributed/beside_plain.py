"""What each of two processes does to train an adapter and plain freezing under FSDP2; the facts go to a file.

torchrun ... -m distributed.beside_plain FOLDER
"""

from __future__ import annotations

import contextlib
import copy
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from peft import get_peft_model
from tiny_models import batch, build
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from distributed.cases import digest
from peft_surgical import SurgicalConfig
from peft_surgical.distributed import leave_base_out_of_units
from peft_surgical.layers import choose_stack


LAYERS = [1, 2]
CASES = {"bert": None, "llama": torch.bfloat16, "gpt2": torch.bfloat16}
"""The dtype in which FSDP2 lets a family compute, if it is another than that of its parameters."""


class Trainee:
    """A model under FSDP2, in mixed precision as accelerate has it: a policy, and autocast."""

    def __init__(self, model: nn.Module, family: str, dtype: torch.dtype | None):
        self.model, self.family, self.dtype = model.train(), family, dtype
        parameters = len(list(model.parameters()))
        leave_base_out_of_units(model, torch.device("cpu"), dtype)
        self.left_out = parameters - len(list(model.parameters()))
        options = {"mp_policy": MixedPrecisionPolicy(param_dtype=dtype)}
        for layer in choose_stack(model).layers:
            fully_shard(layer.module, **options)
        fully_shard(model, **options)
        trained = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-2)

    def precision(self) -> contextlib.AbstractContextManager:
        return torch.autocast("cpu", self.dtype) if self.dtype else contextlib.nullcontext()

    def train(self, seeds: range) -> str:
        self.model.train()
        for seed in seeds:
            with self.precision():
                loss = self.model(**batch(self.family, seed=2 * seed + dist.get_rank())).loss
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self.trained()

    def trained(self) -> str:
        whole = [p.full_tensor() for name, p in self.model.named_parameters() if p.requires_grad]
        return digest(sorted(whole, key=lambda t: (tuple(t.shape), t.flatten().tolist())))

    @torch.no_grad()
    def logits(self) -> str:
        self.model.eval()
        with self.precision():
            return digest([self.model(**batch(self.family, labels=False)).logits.float()])


def compare(family: str, dtype: torch.dtype | None) -> dict[str, object]:
    rates = ["hidden_dropout_prob", "attention_probs_dropout_prob", "resid_pdrop", "attn_pdrop", "embd_pdrop"]
    base = build(family, **{name: 0.0 for name in rates if family != "llama"})
    ours = Trainee(get_peft_model(copy.deepcopy(base), SurgicalConfig(layers=LAYERS)), family, dtype)
    untouched = Trainee(copy.deepcopy(base).requires_grad_(True), family, dtype)
    plain = base.requires_grad_(False)
    for index in LAYERS:
        choose_stack(plain).layers[index].module.requires_grad_(True)
    other = Trainee(plain, family, dtype)
    facts = {"left out": ours.left_out, "trained before": ours.trained()}
    facts |= {"trained": ours.train(range(3)), "trained by plain freezing": other.train(range(3))}
    facts |= {"logits": ours.logits(), "logits by plain freezing": other.logits()}
    with ours.model.disable_adapter():
        facts |= {"logits of the base": ours.logits(), "logits of the plain base": untouched.logits()}
    try:
        ours.model.merge_adapter()
    except ValueError as error:
        facts["merging"] = str(error)
    facts |= {"after the base was used": ours.train(range(3, 5)), "after, by plain freezing": other.train(range(3, 5))}
    return facts


if __name__ == "__main__":
    dist.init_process_group("gloo")
    found = {family: compare(family, dtype) for family, dtype in CASES.items()}
    if dist.get_rank() == 0:
        Path(sys.argv[1], "facts.json").write_text(json.dumps(found, indent=1))
    dist.barrier()
