"""Results of `fusegraph bench`, and scripts that summarize them or measure whole models."""
