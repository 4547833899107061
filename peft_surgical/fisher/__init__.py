"""The diagonal Fisher information of a model's layers (Lodha et al. 2023, section 3.1), for one backward pass.

For each parameter F = mean_n sum_k (d v_kn / d theta)^2, where the values v_kn of sample n come from an objective
(`objective.py`, `tasks.py`). How it is computed:

1. The modules to listen to are usually those that own the parameters. The first batch holds a copy of a sample, whose
   value is left out: its rows get no gradient, or the rows are not those of samples. Then the model runs on one sample
   and on two, which shows the modules to listen to (`targets.py`, `calls.py`).
2. `GradientListener` (`listen.py`) hooks them: inputs are kept in the forward pass, gradients at the outputs
   arrive in the backward pass. No gradient of a weight is asked of autograd. A rule for each kind of module
   (`rules.py`) turns the two into the gradients of single samples (`gradients.py`); modules without a rule are
   computed again for each sample.
3. The gradients are squared and added to a sum over samples at once (`squares.py`, `triton.py`, `sums.py`).
   Nothing of the size of a weight is kept for a sample. Some entries tell what each contributes (`contributions.py`).
4. `layer_fisher` (`measure.py`) lets an engine (`engine.py`) do so for as many layers at a time as there is room for.

Batches hold samples of like length (`batches.py`), and rows of tokens without a gradient are skipped, so that padding
costs next to nothing and never changes a sample's contribution. The model is left as it was (`model_state.py`).
"""

from peft_surgical.fisher.gradients import DenseGradients, ProductGradients, RowGradients
from peft_surgical.fisher.rules import register_rule


__all__ = ["DenseGradients", "ProductGradients", "RowGradients", "register_rule"]
