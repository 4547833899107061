"""The diagonal Fisher information of a model's layers (Lodha et al. 2023, section 3.1), for one backward pass.

For each parameter F = mean_n sum_k (d v_kn / d theta)^2, where the values v_kn of sample n come from an objective
(`log_likelihood.py`). How it is computed:

1. Most models are plain (`plain.py`): the modules to listen to are those with parameters. For others `find_units`
   (`units.py`) runs the model on one sample and on two, and finds them.
2. `GradientListener` (`hooks.py`) hooks them: inputs are kept in the forward pass, gradients at the outputs
   arrive in the backward pass. No gradient of a weight is asked of autograd. A rule for each kind of module
   (`rules.py`) turns the two into the gradients of single samples (`sample_gradients.py`); modules without a
   rule are computed again for each sample (`local.py`).
3. The gradients are squared and added to a sum over samples at once (`pending_squares.py`, `kernel.py`, `sums.py`).
   Nothing of the size of a weight is kept for a sample.
4. `engines.py` does so for all layers in one go; `layer_major.py` goes layer by layer, for a model for whose
   sums there is no room.

Batches hold samples of like length (`batches.py`), and rows of tokens without a gradient are skipped, so that padding
costs next to nothing and never changes a sample's contribution.
"""
