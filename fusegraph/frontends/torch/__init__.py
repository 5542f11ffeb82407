"""Imports graphs of torch: a backend of ``torch.compile``, and exported programs.

table.py     ATen operator -> handler; attention, contraction, diagonal, indices, movement, norm, pointwise, reduction,
             sorting and window fill it
forms.py     shapes, strides and dtypes of a traced graph's tensors
cut.py       which nodes fusegraph computes, and which torch does
build.py     a piece -> Graph
program.py   the function that runs pieces and torch's operators
backend.py   what torch.compile calls
exported.py  programs of torch.export
report.py    what was compiled
"""
