"""The `agent` environment: an agent of the user's plays, and calls the policy as an OpenAI-compatible server."""
