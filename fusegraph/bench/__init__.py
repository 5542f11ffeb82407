"""What `fusegraph bench` times, and how: workloads, the peers they are measured against, rows of results, pictures."""
