"""The console script `peft-surgical`.

Python runs a package's `__init__` before any of its modules. That of peft_surgical registers its methods with PEFT,
and so loads PyTorch, for seconds; help and completions need none of that. This module, which has to lie beside the
package, puts the `__init__` off until a command runs; see `peft_surgical.cli.common`.
"""

import importlib.util
import sys


def main() -> None:
    """Run the command line."""
    spec = importlib.util.find_spec("peft_surgical")
    assert spec is not None
    sys.modules["peft_surgical"] = importlib.util.module_from_spec(spec)
    from peft_surgical.cli import app

    app()
