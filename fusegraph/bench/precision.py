"""What products of float32 are computed in, by torch and by fusegraph's backend alike."""

from __future__ import annotations


def allow_tf32(dtype: str) -> None:
    """Lets torch round operands to tf32: of products and convolutions for "tf32", of convolutions alone for "fp32", as
    its own settings are, of nothing for all other dtypes.
    """
    import torch

    torch.backends.cuda.matmul.allow_tf32 = dtype == "tf32"
    torch.backends.cudnn.allow_tf32 = dtype in ("tf32", "fp32")
