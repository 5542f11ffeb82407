"""The page that ``fusegraph report`` writes: graphs, kernels, passes and memory, in one file that a browser opens."""

#: What is said where igraph or Pygments is missing.
NEEDS = "pages of reports need igraph and Pygments: pip install 'fusegraph[report]'"
