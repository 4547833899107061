"""Two more PEFT methods: tune a few layers, freeze the rest. Importing this registers them with PEFT."""

from peft_surgical.bank import BankStats, DeltaBank
from peft_surgical.convert.convert import convert_adapter, distil_scales, export_lora
from peft_surgical.convert.diff import diff_checkpoints
from peft_surgical.convert.inspect import compare_adapters, inspect_adapter
from peft_surgical.convert.lora import approximate_lora
from peft_surgical.convert.merge import merge_checkpoint
from peft_surgical.convert.pack import pack_checkpoints
from peft_surgical.distributed import shard_by_layer
from peft_surgical.layers import find_stacks, resolve_layers
from peft_surgical.methods.hotswap import prepare_model_for_hotswap
from peft_surgical.methods.rotate import RotateLayers
from peft_surgical.methods.rounding import round_stochastically
from peft_surgical.methods.stratified.model import StratifiedConfig, StratifiedModel
from peft_surgical.methods.surgical import SurgicalConfig, SurgicalModel
from peft_surgical.methods.trainer import BestAdapterCallback, choose_layers, parameter_groups
from peft_surgical.ranking.compare import RankingCallback, compare_rankings
from peft_surgical.ranking.rank import LayerRanking, rank_layers
from peft_surgical.ranking.scores import register_score


__version__ = "0.2.0"

__all__ = [
    "BankStats",
    "BestAdapterCallback",
    "DeltaBank",
    "LayerRanking",
    "RankingCallback",
    "RotateLayers",
    "StratifiedConfig",
    "StratifiedModel",
    "SurgicalConfig",
    "SurgicalModel",
    "approximate_lora",
    "choose_layers",
    "compare_adapters",
    "compare_rankings",
    "convert_adapter",
    "diff_checkpoints",
    "distil_scales",
    "export_lora",
    "find_stacks",
    "inspect_adapter",
    "merge_checkpoint",
    "pack_checkpoints",
    "parameter_groups",
    "prepare_model_for_hotswap",
    "rank_layers",
    "register_score",
    "resolve_layers",
    "round_stochastically",
    "shard_by_layer",
]
