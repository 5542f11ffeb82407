"""Workloads that fusegraph is measured on, and the peers it is measured against."""
