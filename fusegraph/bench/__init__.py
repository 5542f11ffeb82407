"""What `fusegraph bench` times, and how: workloads, the peers they are compared with, rows of results, pictures."""
