"""Two more PEFT methods: tune the layers that matter, freeze the rest. Importing this registers them with PEFT."""

from peft_surgical.callbacks import RankingCallback
from peft_surgical.comparison import compare_rankings
from peft_surgical.layers import find_stacks, resolve_layers
from peft_surgical.ranking import LayerRanking, rank_layers
from peft_surgical.scores import register_score
from peft_surgical.stratified import StratifiedConfig, StratifiedModel
from peft_surgical.surgical import SurgicalConfig, SurgicalModel


__version__ = "0.1.0"

__all__ = [
    "LayerRanking",
    "RankingCallback",
    "StratifiedConfig",
    "StratifiedModel",
    "SurgicalConfig",
    "SurgicalModel",
    "compare_rankings",
    "find_stacks",
    "rank_layers",
    "register_score",
    "resolve_layers",
]
