"""How tokens are sampled: vLLM in a process of its own, its shadow models and its parsers."""
