"""The metrics of a task, from scikit-learn and scipy."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np


METRICS: dict[str, tuple[str, ...]] = {
    "classification": ("accuracy", "f1", "matthews"),
    "regression": ("pearson", "spearman"),
}
"""The metrics of each kind of task, the default one first."""


def compute_metrics(outputs: Any, targets: Any) -> dict[str, float]:
    """Compare a model's outputs with the labels.

    Args:
        outputs: Logits (N, classes), or predicted amounts (N, 1) or (N,).
        targets: Class ids (N,), or amounts (N,) of a floating type.

    Returns:
        For classes: `accuracy`; `f1` of the second class if there are two (as GLUE counts it for MRPC), else the plain
        mean of the F1 of all classes; `matthews`, the Matthews correlation. For amounts: `pearson` and `spearman`
        correlation, 0 where all predictions are equal and none is defined.

    Raises:
        ValueError: The outputs are not all finite.

    Example:

        >>> compute_metrics(np.array([[2.0, 1.0], [0.0, 1.0]]), np.array([0, 1]))
        {'accuracy': 1.0, 'f1': 1.0, 'matthews': 1.0}
    """
    if not np.isfinite(outputs).all():
        raise ValueError("The model's outputs are not finite numbers: training diverged. Lower --learning-rate.")
    if np.issubdtype(targets.dtype, np.floating):
        return _compare_amounts(outputs.reshape(len(targets)), targets)
    return _compare_classes(outputs.argmax(-1), targets, classes=outputs.shape[-1])


def require_metrics() -> None:
    """Make sure that the metrics can be computed, before anything takes time.

    Raises:
        ImportError: scikit-learn is not installed.
    """
    if find_spec("sklearn") is None:
        raise ImportError("The metrics are scikit-learn's, which is not installed: pip install scikit-learn")


def _compare_classes(predicted: np.ndarray, targets: np.ndarray, classes: int) -> dict[str, float]:
    from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

    average = "binary" if classes == 2 else "macro"
    return {
        "accuracy": float(accuracy_score(targets, predicted)),
        "f1": float(f1_score(targets, predicted, average=average, zero_division=0.0)),
        "matthews": float(matthews_corrcoef(targets, predicted)),
    }


def _compare_amounts(predicted: np.ndarray, targets: np.ndarray) -> dict[str, float]:
    from scipy.stats import pearsonr, spearmanr

    if np.ptp(predicted) == 0 or np.ptp(targets) == 0:
        return {"pearson": 0.0, "spearman": 0.0}
    return {
        "pearson": float(pearsonr(predicted, targets).statistic),
        "spearman": float(spearmanr(predicted, targets).statistic),
    }
