"""How the policy is trained."""
