"""Two more PEFT methods: tune the layers that matter, freeze the rest. Importing this registers them with PEFT."""

from peft_surgical.layers import find_stacks, resolve_layers
from peft_surgical.ranking.callback import RankingCallback
from peft_surgical.ranking.comparison import compare_rankings
from peft_surgical.ranking.rank import LayerRanking, rank_layers
from peft_surgical.ranking.scores import register_score
from peft_surgical.stratified.model import StratifiedConfig, StratifiedModel
from peft_surgical.tuners.surgical import SurgicalConfig, SurgicalModel


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
