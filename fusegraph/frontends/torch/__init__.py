"""Graphs of torch: a backend of ``torch.compile``, and exported programs.

table.py     ATen operator -> handler; pointwise, movement, diagonal, indices, reduction, sorting, contraction,
             window and norm fill it
forms.py     what a traced graph says of its tensors
cut.py       which nodes are whose
build.py     a piece -> Graph
program.py   the function that runs pieces and torch's operators
backend.py   what torch.compile calls;  report.py  what came out
"""
