"""Two more PEFT methods: tune the layers that matter, freeze the rest. Importing this registers them with PEFT."""

from peft_surgical.layers import find_stacks, resolve_layers
from peft_surgical.surgical import SurgicalConfig, SurgicalModel


__version__ = "0.1.0"

__all__ = ["SurgicalConfig", "SurgicalModel", "find_stacks", "resolve_layers"]
