"""The base class of `Graph`, which its methods are put in from above: operations.pyi tells type checkers and editors of
them.

A stub, which tools/stubs.py writes, hides the module beside it: this one is small, so that graph.py is checked itself.
"""


class Operations:
    """A graph, to tensors and to the functions that its methods are made of, which `fusegraph.graph` is above."""
