"""Two more PEFT methods: tune the layers that matter, freeze the rest. Importing this registers them with PEFT."""

from peft_surgical.bank import BankStats, DeltaBank
from peft_surgical.deltas.conversion import convert_adapter, export_lora
from peft_surgical.deltas.diff import diff_checkpoints
from peft_surgical.deltas.distillation import distil_scales
from peft_surgical.deltas.inspection import compare_adapters, inspect_adapter
from peft_surgical.deltas.merging import merge_checkpoint
from peft_surgical.layers import find_stacks, resolve_layers
from peft_surgical.ranking.callback import RankingCallback
from peft_surgical.ranking.comparison import compare_rankings
from peft_surgical.ranking.rank import LayerRanking, rank_layers
from peft_surgical.ranking.scores import register_score
from peft_surgical.stratified.model import StratifiedConfig, StratifiedModel
from peft_surgical.surgical.config import SurgicalConfig
from peft_surgical.surgical.model import SurgicalModel
from peft_surgical.tuners.best_adapter import BestAdapterCallback
from peft_surgical.tuners.hotswap import prepare_model_for_hotswap


__version__ = "0.1.0"

__all__ = [
    "BankStats",
    "BestAdapterCallback",
    "DeltaBank",
    "LayerRanking",
    "RankingCallback",
    "StratifiedConfig",
    "StratifiedModel",
    "SurgicalConfig",
    "SurgicalModel",
    "compare_adapters",
    "compare_rankings",
    "convert_adapter",
    "diff_checkpoints",
    "distil_scales",
    "export_lora",
    "find_stacks",
    "inspect_adapter",
    "merge_checkpoint",
    "prepare_model_for_hotswap",
    "rank_layers",
    "register_score",
    "resolve_layers",
]
