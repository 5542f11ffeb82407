"""The zoo: whole models of torchvision and transformers with random weights, timed beside torch.compile and torch."""
