"""The `tools` environment: errands by tool calls."""
