"""How a conversation becomes tokens, and tokens a reply."""
