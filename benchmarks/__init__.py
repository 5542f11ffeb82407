"""Results of `fusegraph bench`, and scripts that tell more of them or measure whole models."""
