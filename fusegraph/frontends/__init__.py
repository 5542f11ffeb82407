"""Importers: read other libraries' graphs and models into a `Graph` through its public methods."""
