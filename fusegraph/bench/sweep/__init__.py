"""The sweep: random cases that look like the layers of real networks, timed beside torch.compile and torch."""
