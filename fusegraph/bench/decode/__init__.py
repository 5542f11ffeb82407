"""Decoding: steps and prompts of Llama-like models with a static cache and quantised weights; beside torch.compile."""
