"""Front doors: other libraries' graphs and models, read into a `Graph` by its public builder."""
