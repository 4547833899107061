"""The diagonal Fisher information of a model's layers (Lodha et al. 2023, section 3.1), for one backward pass.

For each parameter F = mean_n sum_k (d v_kn / d theta)^2, where the values v_kn of sample n come from an objective
(`objective.py`). Hooks on the modules that own the parameters keep inputs and get gradients, which rules (`rules.py`)
turn into the gradients of single samples; these are squared and added up at once. docs/fisher.md tells how, and which
file does what.
"""

from peft_surgical.fisher.gradients import DenseGradients, ProductGradients, RowGradients
from peft_surgical.fisher.rules import register_rule


__all__ = ["DenseGradients", "ProductGradients", "RowGradients", "register_rule"]
