"""The base class of `Graph`, to which `fusegraph.graph` adds the methods: operations.pyi declares them.

tools/stubs.py writes that stub for type checkers and editors.  A stub hides the module beside it, so this module holds
nothing else: graph.py itself is then checked.
"""


class Operations:
    """A graph as tensors and the functions behind its methods see it; they cannot import `fusegraph.graph`."""
