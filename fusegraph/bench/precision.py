"""What products of float32 are computed in, by torch and by fusegraph's backend alike."""

from __future__ import annotations


def allow_tf32(dtype: str) -> None:
    """Lets torch round operands of products and convolutions to tf32 for the dtype "tf32" alone."""
    import torch

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = dtype == "tf32"
