"""The base class of `Graph`: its methods that write nodes, which operations.pyi tells type checkers and editors of.

A stub, which tools/stubs.py writes, hides the module beside it: this one is small, so that graph.py is checked itself.
"""

from fusegraph.methods import METHODS

Operations = type("Operations", (), {**METHODS, "__module__": __name__})
