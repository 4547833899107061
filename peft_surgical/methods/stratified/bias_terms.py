"""Which tensors are bias terms, and which modules are norms.

A bias term is a parameter that a module *adds*, whatever it is called. In the models of transformers these are the
parameters whose name is `bias` or ends in `_bias`: those of linear modules, convolutions and norms, DeBERTa's
`q_bias` and `v_bias`, the per-expert `gate_up_proj_bias`, XLNet's `r_w_bias`, `r_r_bias` and `r_s_bias`, which are
added to the queries. With them go the `bias_u` and `bias_v` of Transformer-XL's attention, and the `bias_ih_l0` of
recurrent modules.

Not bias terms are: the weight of an embedding called `relative_attention_bias`, tables (`position_bias`,
`relative_position_bias_table`), the extra key and value `bias_k` and `bias_v` of `nn.MultiheadAttention`, buffers of
any name, and what a router adds only to choose experts, which gets no gradient (`e_score_correction_bias`,
`expert_bias`).
"""

from __future__ import annotations

import re

from torch import nn

from peft_surgical.copies.select import Owner


_ADDED = re.compile(r"(.*_)?bias(_u|_v|_[ih]h_l\d+(_reverse)?)?")
_NORM = re.compile(r".*(layer|rms|group|no)norm(gated|2d|1p|perhead)?", re.IGNORECASE)
_NOT_ADDED = ("position_bias", "e_score_correction_bias", "expert_bias")


def bias_terms(owner: Owner) -> list[str]:
    """The bias terms that a module holds itself.

    Args:
        owner: The module, see `owners`.

    Returns:
        Names as in the module.

    Example:

        >>> from peft_surgical.copies.select import owners
        >>> [bias_terms(owner) for owner in owners("", nn.Sequential(nn.Linear(2, 2), nn.Embedding(2, 2)))]
        [['bias'], []]
    """
    return [name for name in owner.names if _is_bias_term(owner.module, name)]


def addable_bias(owner: Owner) -> list[str]:
    """`["bias"]` if the module is linear and has none, so that one may be added to it."""
    module = owner.module
    return ["bias"] if isinstance(module, nn.Linear) and module._parameters.get("bias", module) is None else []


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a LayerNorm or RMSNorm of any make.

    Every family of models brings its own class, so the class's name decides.

    Example:

        >>> is_norm(nn.LayerNorm(2)), is_norm(nn.BatchNorm1d(2)), is_norm(nn.Linear(2, 2))
        (True, False, False)
    """
    return any(_NORM.fullmatch(kind.__name__) for kind in type(module).__mro__)


def _is_bias_term(module: nn.Module, name: str) -> bool:
    if isinstance(module, nn.Embedding) or name not in dict(module.named_parameters()):
        return False
    name = name.rpartition(".")[2]
    if isinstance(module, nn.MultiheadAttention) and name in ("bias_k", "bias_v"):
        return False
    return bool(_ADDED.fullmatch(name)) and not name.endswith(_NOT_ADDED)
